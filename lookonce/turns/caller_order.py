"""The order of one caller's images: each waits a moment for those that were asked for before it. Event loop only.

A decoder computes a prompt up to the first image that it lacks, so a prompt's first image is needed before its second.
Look-ups and decoding take longer for one image than for another, in the decoder and in the encoder. So an image that is
ready waits for the earlier ones of its caller, but not for long.

This is no queue: it neither limits images nor lets callers take turns. The queues (lookonce/turns/fair_queue.py)
do that, and sort by the numbers given here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

CallerT = TypeVar("CallerT")

# Maximum wait for earlier images. A photo is decoded and resized in 20 to 60 ms, and a forward pass over one took
# 320 ms (small-llava, 2 × AMD EPYC, 2026-11-22).
_MAX_WAIT_S = 0.1


@dataclass(slots=True, eq=False)
class Turn(Generic[CallerT]):
    """One image's position in the order, held from the request until the image has gone on or has left."""

    caller: CallerT
    # Position among all images ever asked for.
    number: int
    # The caller's images that have not gone on, by their numbers, in the order of asking. One call can bring thousands,
    # so nothing here takes time in proportion to them.
    _line: OrderedDict[int, Turn[CallerT]]
    _has_passed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Waits until all earlier images of the caller have passed on, at most 0.1 s."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_S):
                while (first := next(iter(self._line.values()), self)).number < self.number:
                    await first._has_passed.wait()

    def pass_on(self) -> None:
        """Lets later images go on: this one is queued for the model, was found, or is brought by another request."""
        self._has_passed.set()
        self._line.pop(self.number, None)


class CallerOrder(Generic[CallerT]):
    """The images in progress, by caller."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # Callers whose images have all gone on are removed.
        self._lines: dict[CallerT, OrderedDict[int, Turn[CallerT]]] = {}

    @contextmanager
    def entered(self, caller: CallerT) -> Iterator[Turn[CallerT]]:
        """Takes the next position for an image; the caller's later images wait until `pass_on` or the block's end."""
        line = self._lines.setdefault(caller, OrderedDict())
        turn = Turn(caller, next(self._numbers), line)
        line[turn.number] = turn
        try:
            yield turn
        finally:
            turn.pass_on()
            if not line and self._lines.get(caller) is line:
                del self._lines[caller]
