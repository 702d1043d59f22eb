"""The breaker opens after a streak of failures, probes after a back-off, and ignores outdated outcomes."""

from __future__ import annotations

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lookonce.store.redis.circuit_breaker import BreakerState, CircuitBreaker, Permit


class ManualClock:
    """A clock that advances only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=3, backoff_s=0.5, max_backoff_s=2.0, clock=clock)


def ask(breaker: CircuitBreaker, succeeded: bool) -> None:
    permit = breaker.acquire()
    assert permit is not None
    breaker.report(permit, succeeded)


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        ask(breaker, succeeded=False)


def test_stays_closed_below_the_threshold(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.acquire() is not None


def test_a_success_ends_the_streak(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    ask(breaker, succeeded=True)
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_opens_at_the_threshold_and_refuses(breaker: CircuitBreaker) -> None:
    fail(breaker, 3)
    assert breaker.state is BreakerState.OPEN
    assert breaker.acquire() is None


def test_lets_one_probe_through_after_the_backoff(breaker: CircuitBreaker, clock: ManualClock) -> None:
    fail(breaker, 3)
    clock.now_s += 0.49
    assert breaker.acquire() is None
    clock.now_s += 0.02
    assert breaker.acquire() is not None
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.acquire() is None


def test_asking_for_the_state_does_not_change_it(breaker: CircuitBreaker, clock: ManualClock) -> None:
    fail(breaker, 3)
    clock.now_s += 10
    assert breaker.state is BreakerState.OPEN
    assert breaker.acquire() is not None


def test_a_successful_probe_closes_and_resets_the_streak(breaker: CircuitBreaker, clock: ManualClock) -> None:
    fail(breaker, 3)
    clock.now_s += 0.5
    ask(breaker, succeeded=True)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_failed_probes_double_the_backoff_up_to_its_limit(breaker: CircuitBreaker, clock: ManualClock) -> None:
    fail(breaker, 3)
    for backoff_s in (0.5, 1.0, 2.0, 2.0):
        clock.now_s += backoff_s - 0.01
        assert breaker.acquire() is None
        clock.now_s += 0.01
        fail(breaker, 1)
        assert breaker.state is BreakerState.OPEN


def test_the_backoff_is_reset_after_a_recovery(breaker: CircuitBreaker, clock: ManualClock) -> None:
    fail(breaker, 3)
    clock.now_s += 0.5
    fail(breaker, 1)
    clock.now_s += 1.0
    ask(breaker, succeeded=True)
    fail(breaker, 3)
    clock.now_s += 0.5
    assert breaker.acquire() is not None


@pytest.mark.parametrize("late_verdict", [True, False])
def test_an_outcome_from_before_the_last_change_is_ignored(
    breaker: CircuitBreaker, clock: ManualClock, late_verdict: bool
) -> None:
    slow = breaker.acquire()
    assert slow is not None
    fail(breaker, 3)
    breaker.report(slow, late_verdict)
    states = [breaker.state]
    clock.now_s += 0.5
    assert breaker.acquire() is not None
    breaker.report(slow, late_verdict)
    states.append(breaker.state)
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN]


def test_many_threads_get_one_probe_between_them(breaker: CircuitBreaker, clock: ManualClock) -> None:
    fail(breaker, 3)
    clock.now_s += 1
    permits: list[Permit | None] = []
    barrier = threading.Barrier(8)

    def take() -> None:
        barrier.wait()
        permits.append(breaker.acquire())

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([permit for permit in permits if permit is not None]) == 1


@pytest.mark.parametrize(("threshold", "backoff_s", "max_backoff_s"), [(0, 0.5, 5.0), (1, 0.0, 5.0), (1, 2.0, 1.0)])
def test_refuses_settings_that_make_no_sense(threshold: int, backoff_s: float, max_backoff_s: float) -> None:
    with pytest.raises(ValueError, match="failure_threshold"):
        CircuitBreaker(threshold, backoff_s, max_backoff_s)


class BreakerModel(RuleBasedStateMachine):
    """Requests, outcomes and pauses in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.breaker = CircuitBreaker(failure_threshold=2, backoff_s=1.0, max_backoff_s=4.0, clock=self.clock)
        self.permits: list[Permit] = []

    @rule()
    def acquire(self) -> None:
        state = self.breaker.state
        permit = self.breaker.acquire()
        assert permit is not None or state is not BreakerState.CLOSED
        assert permit is None or state is not BreakerState.HALF_OPEN
        if permit is not None:
            self.permits.append(permit)

    @rule(index=st.integers(0, 20), succeeded=st.booleans())
    def report(self, index: int, succeeded: bool) -> None:
        if self.permits:
            self.breaker.report(self.permits.pop(index % len(self.permits)), succeeded)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def recovers_whenever_the_server_does(self) -> None:
        """Checks that a back-off and one success close the breaker from any state, once all permits are reported."""
        if self.permits:
            return
        assert self.breaker.state is not BreakerState.HALF_OPEN

    def teardown(self) -> None:
        for permit in self.permits:
            self.breaker.report(permit, succeeded=False)
        self.clock.now_s += 4.0
        ask(self.breaker, succeeded=True)
        assert self.breaker.state is BreakerState.CLOSED


TestBreakerModel = BreakerModel.TestCase
