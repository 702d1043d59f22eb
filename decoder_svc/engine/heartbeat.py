"""Detects a thread that hangs: one that works in rounds and does not finish the current round in time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Heartbeat:
    """The start of a thread's current round. The thread itself writes it, any thread may read it."""

    def __init__(self, longest_round_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """A round that takes longer than `longest_round_s` seconds counts as hanging."""
        self._longest_round_s = longest_round_s
        self._clock = clock
        self._began_s: float | None = None

    @property
    def began_s(self) -> float | None:
        """Time at which the current round began, seconds; None while the thread waits for work."""
        return self._began_s

    @property
    def round_s(self) -> float:
        """Age of the current round, seconds; 0 while the thread waits for work."""
        began_s = self._began_s
        return 0.0 if began_s is None else self._clock() - began_s

    @property
    def is_fresh(self) -> bool:
        """Whether the thread waits for work, or its current round is not too long yet."""
        return self.round_s <= self._longest_round_s

    def begin_round(self) -> None:
        """Ends the current round, if there is one, and begins the next."""
        self._began_s = self._clock()

    def rest(self) -> None:
        """Notes that the thread waits for work, which may take any time."""
        self._began_s = None
