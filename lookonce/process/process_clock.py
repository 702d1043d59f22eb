"""The time that another process spends on one piece of work. Processor time counts, not the time on the clock.

On a busy machine a process can wait for a processor longer than it computes. That says nothing about the work, so the
limit on it is one of processor time. A second, longer limit on the clock ends a process that gets none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

# Least time between two looks at the process, and before the first one, seconds. A look takes 0.1 ms, and most work
# less than this time.
_LOOK_S = 0.02
# Least time to wait, seconds.
_MIN_WAIT_S = 0.002


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Limits on one piece of work."""

    # Processor time of the process, seconds. Work that needs more is refused.
    cpu_s: float
    # Time on the clock, seconds. The caller of work that takes longer is asked to try again.
    wall_s: float


class ProcessClock:
    """The time of one piece of work, from the creation of the clock. It does not count the first hundredths of it."""

    def __init__(self, pid: int, limits: TimeLimits) -> None:
        self._pid = pid
        self._limits = limits
        self._process: psutil.Process | None = None
        self._cpu_at_start_s = 0.0
        self._cpu_left_s = limits.cpu_s
        self._looked_s = time.monotonic()
        self._deadline_s = self._looked_s + limits.wall_s

    @property
    def is_cpu_used_up(self) -> bool:
        """Whether the process has had all processor time that the work may take."""
        self._look()
        return self._cpu_left_s <= 0

    def wait_s(self) -> float:
        """Returns a time to wait before the next call, seconds. Raises TimeoutError when a limit is reached."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._look()
        elif self._process is None:
            return _LOOK_S
        left_s = min(self._cpu_left_s, self._deadline_s - now_s)
        if left_s <= 0:
            raise TimeoutError
        return max(_MIN_WAIT_S, left_s)

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        try:
            if self._process is None:
                self._process = psutil.Process(self._pid)
                self._cpu_at_start_s = _cpu_s(self._process)
            self._cpu_left_s = self._limits.cpu_s - (_cpu_s(self._process) - self._cpu_at_start_s)
        except psutil.Error:
            # The process has ended, which its socket will tell.
            pass


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
