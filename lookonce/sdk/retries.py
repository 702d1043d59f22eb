"""Repeats calls that failed because no server took them: how often, after which pause, and within which budget.

A call is repeated after UnavailableError and OverloadedError. The pause is the one that the server advises, or random
up to a limit that doubles, so that clients which failed together do not come back together ("Exponential Backoff And
Jitter", AWS, 2015). All calls of a client share one budget, as in Finagle: retries of more than a fifth of the calls
would multiply the load of a fleet that is down or full.

A call is not repeated if its deadline would pass before the next attempt.
"""

from __future__ import annotations

import random
import threading
import time

from lookonce.errors import DeadlineError, InvalidParameterError, LookonceError, OverloadedError, UnavailableError
from lookonce.sdk.connection.channel import Deadline

# Limit of the first pause, and of every later one, seconds.
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 8.0
# Advised pauses are prolonged by a random part of up to this share.
_ADVISED_JITTER = 0.2
# Longest advised pause that is waited for, seconds. Beyond it the caller decides.
_MAX_ADVISED_S = 60.0
# Retries that each call and each second add to the budget, and the most that it saves. A replica that ends cuts all
# calls of a client that run there.
_PER_CALL = 0.2
_PER_SECOND = 10.0
_MAX_SAVED = 500.0


class RetryBudget:
    """Limits the retries of one client. Thread-safe."""

    def __init__(self) -> None:
        self._saved = _MAX_SAVED
        self._filled_s = time.monotonic()
        self._lock = threading.Lock()

    def note_call(self) -> None:
        """Adds the share of one more call."""
        with self._lock:
            self._saved = min(_MAX_SAVED, self._saved + _PER_CALL)

    def take(self) -> bool:
        """Takes one retry. Returns whether there was one."""
        with self._lock:
            now_s = time.monotonic()
            self._saved = min(_MAX_SAVED, self._saved + (now_s - self._filled_s) * _PER_SECOND)
            self._filled_s = now_s
            if self._saved < 1.0:
                return False
            self._saved -= 1.0
            return True


class Retries:
    """Holds what the retries of one client share. Thread-safe."""

    def __init__(self) -> None:
        self.budget = RetryBudget()
        # Whether a server has ever answered. Then the address is right, and calls wait for its servers to come back.
        self.has_answered = False

    def attempts(self, deadline: Deadline, max_retries: int) -> Attempts:
        """Returns the attempts of a new call, which is repeated at most `max_retries` times."""
        self.budget.note_call()
        return Attempts(self, deadline, max_retries)


class Attempts:
    """The attempts of one call with one deadline. Not thread-safe."""

    def __init__(self, retries: Retries, deadline: Deadline, max_retries: int) -> None:
        self._retries = retries
        self._max_retries = max_retries
        self._deadline = deadline
        self._num_retries = 0
        # Message of the last failed attempt. The error itself refers to the frames of the call, and so to its images.
        self._failure = ""

    @property
    def is_first(self) -> bool:
        """Whether no attempt has been repeated."""
        return self._num_retries == 0

    @property
    def wait_for_ready(self) -> bool:
        """Whether the next attempt waits, until the deadline, for a server that can be reached."""
        return self._num_retries > 0 and self._retries.has_answered

    def succeeded(self) -> None:
        """Notes that a server has answered."""
        self._retries.has_answered = True

    def pause_s(self, error: LookonceError) -> float | None:
        """Returns the pause before the next attempt, seconds; None if the call ends with this error.

        Adds the failure of the attempt before to the message of a DeadlineError. The caller raises the error: raised
        here, it would refer to a frame that refers to it, and the images of the call would stay in memory.
        """
        if isinstance(error, DeadlineError) and self._failure:
            error.message += f"; the attempt before it failed: {self._failure}"
            error.args = (error.message,)
            error.text_is_foreign = True
        if not isinstance(error, UnavailableError | DeadlineError):
            self._retries.has_answered = True
        advised_s = self._advised_s(error)
        if advised_s is None or self._num_retries >= self._max_retries:
            return None
        pause_s = max(
            advised_s * random.uniform(1.0, 1.0 + _ADVISED_JITTER),
            random.uniform(0.0, min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_retries)),
        )
        if not self._is_in_time(pause_s) or not self._retries.budget.take():
            return None
        self._num_retries += 1
        self._failure = error.message
        return pause_s

    def _advised_s(self, error: LookonceError) -> float | None:
        """Returns the least pause before the next attempt, seconds; None if the error is final."""
        if isinstance(error, UnavailableError | OverloadedError):
            advised_s = error.retry_after_s or 0.0
            return advised_s if advised_s <= _MAX_ADVISED_S else None
        # The server may not have noticed yet that the attempt before, with the same id, has lost its connection.
        is_own_id = isinstance(error, InvalidParameterError) and error.field == "request_id"
        return 0.0 if is_own_id and self._num_retries else None

    def _is_in_time(self, pause_s: float) -> bool:
        return self._deadline.at_s is None or time.monotonic() + pause_s < self._deadline.at_s
