"""Images of one caller reach the encoder's model in the order in which they were asked for. Event loop only.

A decoder computes a prompt up to the first image that it lacks, so the first image of a prompt is wanted before the
second. Look-ups and decoding take each image another time, on both sides of the wire; one that is ready to go on waits
a moment for those of its caller that were asked for before it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

CallerT = TypeVar("CallerT")

# A photo is decoded and resized in 20 to 60 ms, and a pass over one took 320 ms (small-llava, 2 × AMD EPYC,
# 2026-11-22): longer than this no image is waited for.
_LONGEST_WAIT_S = 0.1


@dataclass(slots=True, eq=False)
class Turn(Generic[CallerT]):
    """One image's place among those of its caller."""

    caller: CallerT
    # Position among all images ever asked for.
    number: int
    # Those of the caller that were asked for before and are still on their way.
    _earlier: tuple[Turn[CallerT], ...] = ()
    _has_passed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Returns when no earlier image of the caller is on its way, or after a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT_S):
                for turn in self._earlier:
                    await turn._has_passed.wait()

    def pass_on(self) -> None:
        """Nobody needs to wait for this image: it has gone on, was found, or is somebody else's to bring."""
        self._has_passed.set()


class CallerOrder(Generic[CallerT]):
    """The images that are on their way, by caller."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # In the order in which they were asked for; only callers that have any.
        self._turns: dict[CallerT, list[Turn[CallerT]]] = {}

    @contextmanager
    def entered(self, caller: CallerT) -> Iterator[Turn[CallerT]]:
        """An image that is on its way until the block ends or it says `pass_on`."""
        line = self._turns.setdefault(caller, [])
        turn = Turn(caller, next(self._numbers), tuple(line))
        line.append(turn)
        try:
            yield turn
        finally:
            turn.pass_on()
            # Else a caller with always one more image on its way would keep all that it ever had.
            turn._earlier = ()
            line.remove(turn)
            if not line:
                del self._turns[caller]
