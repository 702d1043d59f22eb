"""Whether a thread that works in rounds still gets to the end of them. Knows nothing of what it does."""

from __future__ import annotations

import time
from collections.abc import Callable


class Heartbeat:
    """Written by the thread itself, read by any."""

    def __init__(self, longest_round_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """A round that takes longer than `longest_round_s` is taken to hang."""
        self._longest_round_s = longest_round_s
        self._clock = clock
        self._round_began_s: float | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the thread rests, or began its round not too long ago."""
        began_s = self._round_began_s
        return began_s is None or self._clock() - began_s <= self._longest_round_s

    def begin_round(self) -> None:
        """What came before is done."""
        self._round_began_s = self._clock()

    def rest(self) -> None:
        """The thread waits for work, as long as it takes."""
        self._round_began_s = None
