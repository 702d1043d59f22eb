"""Time that passes when a test says so."""

from __future__ import annotations


class Clock:
    """Stands still until it is set; in the place of time.monotonic."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        """Returns the current time of the fake clock, seconds."""
        return self.now_s
