"""Says whether constraints can be served, before their requests are admitted. Compiles them in a process of its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from decoder_svc.constraint.constraint_process import ConstraintProcess, started_process
from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from lookonce.errors import InvalidParameterError, UnavailableError
from lookonce.logs import get_logger
from lookonce.process.limited_process import RETRY_S
from lookonce.process.process_clock import ProcessClock, TimeLimits

# A schema of 400 properties with patterns takes 0.02 s.
TIME_LIMITS = TimeLimits(cpu_s=1.0, wall_s=20.0)
# Less than the stack of the process that follows answers: what can be compiled here can be compiled there.
_STACK_BYTES = 8 << 20
# A crash is a constraint's fault if it ends a second process, too. The first one may have had too much to hold.
_MAX_CRASHES = 2
# Processes that are killed from outside while they compile one constraint.
_MAX_KILLS = 3
# Constraints whose outcomes are known, and the sum of their texts.
_MAX_KNOWN = 1024
_MAX_KNOWN_CHARS = 8 * 1024 * 1024

_log = get_logger(__name__)


class ConstraintChecker:
    """Compiles constraints and remembers the outcomes. Any thread may use it; constraints are compiled one by one."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], time_limits: TimeLimits = TIME_LIMITS) -> None:
        """`load_vocabulary` is called for the first constraint, and again after a crash."""
        self._load_vocabulary = load_vocabulary
        self._time_limits = time_limits
        self._process: ConstraintProcess | None = None
        self._is_closed = False
        # Held while a constraint is compiled.
        self._compiling = threading.Lock()
        # The reason for each refusal, None for constraints that can be served; the least recently asked one first.
        self._known: OrderedDict[Constraint, str | None] = OrderedDict()
        self._known_chars = 0
        self._lock = threading.Lock()

    def is_served(self, constraint: Constraint) -> bool:
        """Whether the constraint was checked before, and can be served. Takes no time."""
        with self._lock:
            return self._known.get(constraint, "") is None

    def check(self, constraint: Constraint) -> None:
        """Raises InvalidParameterError with the reason if a constraint cannot be served.

        Raises UnavailableError if this process gets no processor time, UnsupportedError for a vocabulary that cannot be
        used, and InternalError if no process can be started. Takes up to the limits in time.
        """
        refusal = self._outcome(constraint)
        if refusal is not None:
            place, _, reason = refusal.partition(": ")
            if constraint.kind is ConstraintKind.TOOL_CALLS and place.startswith("["):
                raise InvalidParameterError(field_of(constraint) + place, reason)
            raise InvalidParameterError(field_of(constraint), refusal)

    def close(self) -> None:
        """Ends the process. Whoever still checks a constraint gets UnavailableError."""
        self._is_closed = True
        self._end_process()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _outcome(self, constraint: Constraint) -> str | None:
        """Returns the reason for a refusal, or None."""
        with self._lock:
            if constraint in self._known:
                self._known.move_to_end(constraint)
                return self._known[constraint]
        with self._compiling:
            # Another thread may have compiled it meanwhile.
            with self._lock:
                if constraint in self._known:
                    return self._known[constraint]
            refusal = self._refusal(constraint)
            self._remember(constraint, refusal)
            return refusal

    def _refusal(self, constraint: Constraint) -> str | None:
        """Compiles a constraint. Returns the reason if that fails."""
        num_crashes = num_kills = 0
        while num_kills < _MAX_KILLS:
            process = self._running()
            clock = ProcessClock(process.pid, self._time_limits)
            try:
                return process.check(constraint, clock.wait_s)
            except TimeoutError:
                is_slow = clock.is_cpu_used_up
                self._end_process()
                if is_slow:
                    return f"takes more than {self._time_limits.cpu_s:g} s of processor time to compile; simplify it"
                raise UnavailableError(
                    f"the server is too busy: in {self._time_limits.wall_s:g} s the constraint was not compiled; "
                    "try again",
                    retry_after_s=RETRY_S,
                ) from None
            except (EOFError, OSError):
                was_crash = not process.was_killed_from_outside()
                self._end_process()
                _log.warning("the process that compiles constraints ended", was_crash=was_crash)
                num_crashes += was_crash
                num_kills += not was_crash
                if num_crashes == _MAX_CRASHES:
                    return "needs too much memory, or is nested too deeply; simplify it"
        raise UnavailableError("the process that compiles constraints was killed from outside; try again")

    def _running(self) -> ConstraintProcess:
        if self._process is not None and self._process.has_ended:
            # It was killed from outside while idle.
            self._end_process()
        if self._process is None and not self._is_closed:
            self._process = started_process(self._load_vocabulary, _STACK_BYTES)
        process = self._process
        if self._is_closed or process is None:
            self._end_process()
            raise UnavailableError("the server stops")
        return process

    def _remember(self, constraint: Constraint, refusal: str | None) -> None:
        with self._lock:
            self._known[constraint] = refusal
            self._known_chars += len(constraint.text)
            while len(self._known) > 1 and (len(self._known) > _MAX_KNOWN or self._known_chars > _MAX_KNOWN_CHARS):
                dropped, _ = self._known.popitem(last=False)
                self._known_chars -= len(dropped.text)


def field_of(constraint: Constraint) -> str:
    """Returns the contract's name of a constraint's field."""
    return "chat.tools" if constraint.kind is ConstraintKind.TOOL_CALLS else f"sampling.{constraint.kind.value}"
