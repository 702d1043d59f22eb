"""A circuit breaker: stops requests to a server that does not answer, and probes for its return.

    CLOSED ──streak of failures──► OPEN ──back-off over──► HALF_OPEN (one probe) ──success──► CLOSED
                                    ▲────────────probe failed, back-off doubled──────┘

Independent of Redis. Every method may be called from any thread.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


class BreakerState(enum.Enum):
    """State of a breaker. The value is a metric label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission for one request. Its outcome must be given to `CircuitBreaker.report`."""

    # Number of state changes so far. The breaker ignores outcomes of requests from before the latest change.
    generation: int


class CircuitBreaker:
    """A breaker that opens after `failure_threshold` failures in a row.

    The first probe is allowed `backoff_s` seconds after opening. Each failed probe doubles that, up to `max_backoff_s`.
    """

    def __init__(
        self,
        failure_threshold: int = 3,
        backoff_s: float = 0.5,
        max_backoff_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failure_threshold < 1 or not 0 < backoff_s <= max_backoff_s:
            raise ValueError("a breaker needs failure_threshold ≥ 1 and 0 < backoff_s ≤ max_backoff_s")
        self._failure_threshold = failure_threshold
        self._first_backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._generation = 0
        self._num_failures = 0
        self._backoff_s = backoff_s
        self._opened_at_s = 0.0

    @property
    def state(self) -> BreakerState:
        """The current state. After the back-off it stays OPEN until a caller takes the permit of the probe."""
        with self._lock:
            return self._state

    def acquire(self) -> Permit | None:
        """Returns a permit, or None while no request should be made.

        Every permit must be reported: a probe that never is blocks all further requests.
        """
        with self._lock:
            if self._state is BreakerState.OPEN and self._clock() >= self._opened_at_s + self._backoff_s:
                self._enter(BreakerState.HALF_OPEN)
                return Permit(self._generation)
            return Permit(self._generation) if self._state is BreakerState.CLOSED else None

    def report(self, permit: Permit, succeeded: bool) -> None:
        """Records the outcome of the request that `permit` allowed."""
        with self._lock:
            if permit.generation != self._generation:
                return
            if succeeded:
                self._close()
            elif self._state is BreakerState.HALF_OPEN:
                self._open(min(2 * self._backoff_s, self._max_backoff_s))
            else:
                self._num_failures += 1
                if self._num_failures >= self._failure_threshold:
                    self._open(self._first_backoff_s)

    def _close(self) -> None:
        self._num_failures = 0
        if self._state is not BreakerState.CLOSED:
            self._enter(BreakerState.CLOSED)

    def _open(self, backoff_s: float) -> None:
        self._backoff_s = backoff_s
        self._opened_at_s = self._clock()
        self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._generation += 1
