"""Starts processes of a stack again that have ended by themselves, while the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lookonce.errors import StartupError, UnavailableError
from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import START_TIMEOUT_S, LocalStack

# Largest number of restarts of one process in this time, seconds. More often, it would not help.
MAX_RESTARTS = 5
_WINDOW_S = 600.0
# Pause before the first restart in that time, seconds. Each further one is twice as long.
_FIRST_PAUSE_S = 0.5
# Time for a process that did not become ready to end by itself, seconds.
_STOP_TIMEOUT_S = 5.0
_CACHE = "the cache server"


@dataclass(slots=True)
class _Restarts:
    """The restarts of one process: when they were, and when the next one is due."""

    at_s: list[float] = field(default_factory=list)
    # None while the process runs.
    due_s: float | None = None


class Supervisor:
    """Watches a stack. A process that starts again keeps its flags and its addresses.

    Use it from one long-lived thread: processes end with the thread that starts them (see ChildProcess).
    """

    def __init__(
        self, stack: LocalStack, tell: Callable[[str], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`tell` is called with a line for people about each end and each restart."""
        self._stack = stack
        self._tell = tell
        self._now_s = now_s
        self._restarts: dict[str, _Restarts] = {}
        # The times at which processes were started again that are not ready yet.
        self._starting: dict[str, float] = {}

    def look(self) -> None:
        """Looks at all processes once and starts those again whose pause is over.

        Raises UnavailableError with the end of the log of a process that has ended too often.
        """
        self._look_at_cache()
        for process in self._stack.services:
            if process.returncode is not None:
                self._look_at_ended(process)
            elif process.name in self._starting:
                self._look_at_starting(process)

    def _look_at_ended(self, process: ChildProcess) -> None:
        reason = f"ended with status {process.returncode}"
        if self._is_due(process.name, reason, process.log_tail):
            self._stack.restart(process)
            self._starting[process.name] = self._now_s()

    def _look_at_starting(self, process: ChildProcess) -> None:
        """Notes that a process is ready again, or ends one that does not get ready."""
        if _is_ready(process):
            del self._starting[process.name]
            self._tell(f"{process.name} is ready again")
        elif self._now_s() - self._starting[process.name] > START_TIMEOUT_S:
            self._tell(f"{process.name} did not become ready in {START_TIMEOUT_S:.0f} s")
            process.stop(_STOP_TIMEOUT_S)

    def _look_at_cache(self) -> None:
        redis = self._stack.redis
        if redis is not None and not redis.is_running and self._is_due(_CACHE, "has ended", lambda: ""):
            redis.start()
            self._tell(f"{_CACHE} runs again, empty")

    def _is_due(self, name: str, reason: str, log_tail: Callable[[], str]) -> bool:
        """Whether an ended process is to be started now. The first call after its end plans that and tells of it."""
        now_s = self._now_s()
        restarts = self._restarts.setdefault(name, _Restarts())
        if restarts.due_s is None:
            restarts.at_s = [at_s for at_s in restarts.at_s if now_s - at_s < _WINDOW_S]
            if len(restarts.at_s) == MAX_RESTARTS:
                times = f"{MAX_RESTARTS} restarts in {_WINDOW_S / 60:.0f} minutes did not help"
                raise UnavailableError(f"{name} {reason}; {times}\n{log_tail()}".rstrip())
            pause_s = _FIRST_PAUSE_S * 2 ** len(restarts.at_s)
            restarts.due_s = now_s + pause_s
            self._tell(f"{name} {reason}; it starts again in {pause_s:g} s")
        if now_s < restarts.due_s:
            return False
        restarts.at_s.append(now_s)
        restarts.due_s = None
        return True


def _is_ready(process: ChildProcess) -> bool:
    try:
        return process.is_ready()
    except StartupError:
        # It has ended in this moment, which the next look sees.
        return False
