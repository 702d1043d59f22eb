"""The time that another process spends on one piece of work. Processor time counts, not the time on the clock.

On a busy machine a process can wait for a processor longer than it computes. That says nothing about the work, so the
limit on it is one of processor time. A second, longer limit on the clock ends a process that gets none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

# Least time between two looks at the process, seconds. The kernel counts processor time in steps of 10 ms.
_MIN_WAIT_S = 0.002


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Limits on one piece of work."""

    # Processor time of the process, seconds. Work that needs more is refused.
    cpu_s: float
    # Time on the clock, seconds. The caller of work that takes longer is asked to try again.
    wall_s: float


class ProcessClock:
    """The time of one piece of work, from the creation of the clock."""

    def __init__(self, pid: int, limits: TimeLimits) -> None:
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.Error:
            # It has just ended, which its socket will tell.
            self._process = None
        self._limits = limits
        self._cpu_at_start_s = self._cpu_s()
        self._deadline_s = time.monotonic() + limits.wall_s

    @property
    def is_cpu_used_up(self) -> bool:
        """Whether the process has had all processor time that the work may take."""
        return self._cpu_left_s <= 0

    def wait_s(self) -> float:
        """Returns a time to wait before the next call, seconds. Raises TimeoutError when a limit is reached."""
        left_s = min(self._cpu_left_s, self._deadline_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError
        return max(_MIN_WAIT_S, left_s)

    @property
    def _cpu_left_s(self) -> float:
        return self._limits.cpu_s - (self._cpu_s() - self._cpu_at_start_s)

    def _cpu_s(self) -> float:
        if self._process is None:
            return 0.0
        try:
            times = self._process.cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system
