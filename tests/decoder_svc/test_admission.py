"""Who has no time to wait hears so on arrival; everybody else waits."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest

from decoder_svc.admission import Admission
from decoder_svc.engine.engine_interface import EngineLoad
from lookonce.errors import InternalError, OverloadedError

NUM_PLACES = 4
SERVED_S = 2.0
NUM_TOKENS = 20


@dataclass
class Service:
    """Requests that are being served."""

    kv_cache_usage: float = 0.5
    running: int = NUM_PLACES
    step_s: float = 0.0
    live: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.admission = Admission(self.load, NUM_PLACES)

    def load(self) -> EngineLoad:
        return EngineLoad(self.running, 0, 0, self.kv_cache_usage, 0, self.step_s)

    def enter(self, number: int = 1, *, priority: int = 0, has_s: float | None = None) -> None:
        for _ in range(number):
            self.live.enter_context(self.admission.entered(priority, None, has_s))


@pytest.fixture
def service() -> Service:
    """Requests took two seconds and twenty tokens of late."""
    service = Service()
    service.admission.note_served(SERVED_S, NUM_TOKENS)
    return service


def test_while_there_are_places_nobody_is_refused(service: Service) -> None:
    for _ in range(NUM_PLACES):
        assert service.admission.expected_s(0, None) == 0
        service.enter(has_s=0.001)
    assert service.admission.expected_s(0, None) > 0, "each of them has a place"


def test_who_is_done_leaves_its_place_before_its_answer_has_been_read(service: Service) -> None:
    with contextlib.ExitStack() as readers:
        leaves = [readers.enter_context(service.admission.entered(0, None, None)) for _ in range(NUM_PLACES + 3)]
        assert service.admission.expected_s(0, None) > 0
        for leave in leaves:
            leave()
            leave()
        assert service.admission.expected_s(0, None) == 0
    service.enter(NUM_PLACES - 1)
    assert service.admission.expected_s(0, None) == 0, "nobody left twice"
    service.enter()
    assert service.admission.expected_s(0, None) > 0


def test_a_request_that_would_end_too_late_is_refused_with_advice(service: Service) -> None:
    service.enter(NUM_PLACES + 3)
    # Four are ahead of it for four places: 2 s until it runs, 2 s until it is done.
    assert service.admission.expected_s(0, None) == pytest.approx(2 * SERVED_S)
    with pytest.raises(OverloadedError, match=r"would take about 4\.0 s, and the deadline is in 4\.0 s") as caught:
        service.enter(has_s=4.0)
    assert caught.value.retry_after_s == pytest.approx(0.6)
    service.enter(has_s=5.0)


def test_who_has_no_deadline_waits_however_long(service: Service) -> None:
    service.enter(1000)
    wait_s = (1000 + 1 - NUM_PLACES) * SERVED_S / NUM_PLACES
    assert service.admission.expected_s(0, None) == pytest.approx(wait_s + SERVED_S), "all of them wait"


def test_a_short_answer_is_expected_earlier(service: Service) -> None:
    service.enter(NUM_PLACES)
    wait_s = SERVED_S / NUM_PLACES
    assert service.admission.expected_s(0, 1) == pytest.approx(wait_s + SERVED_S / NUM_TOKENS)
    assert service.admission.expected_s(0, 10_000) == pytest.approx(wait_s + SERVED_S)


def test_who_goes_first_does_not_wait_for_those_behind(service: Service) -> None:
    service.enter(100, priority=5)
    service.enter(priority=0, has_s=3.0)
    with pytest.raises(OverloadedError):
        service.enter(priority=5, has_s=3.0)


def test_before_anybody_has_ended_nobody_is_refused() -> None:
    service = Service()
    service.enter(1000, has_s=0.001)
    assert service.admission.expected_s(0, None) == 0
    service.admission.note_served(SERVED_S, NUM_TOKENS)
    with pytest.raises(OverloadedError):
        service.enter(has_s=0.001)


def test_a_full_pool_has_fewer_places(service: Service) -> None:
    service.enter(NUM_PLACES)
    assert service.admission.expected_s(0, None) == pytest.approx(SERVED_S / NUM_PLACES + SERVED_S)
    service.kv_cache_usage, service.running = 0.95, 1
    assert service.admission.expected_s(0, None) == pytest.approx(SERVED_S * NUM_PLACES + SERVED_S)


def test_the_mean_follows_what_is_served_now(service: Service) -> None:
    service.enter(NUM_PLACES)
    for _ in range(100):
        service.admission.note_served(10 * SERVED_S, NUM_TOKENS)
    assert service.admission.expected_s(0, None) == pytest.approx(10 * (SERVED_S + SERVED_S / NUM_PLACES), rel=0.01)


def test_steps_that_take_longer_than_they_did_count_at_once(service: Service) -> None:
    service.enter(NUM_PLACES)
    service.step_s = SERVED_S / NUM_TOKENS / 2
    assert service.admission.expected_s(0, None) == pytest.approx(SERVED_S + SERVED_S / NUM_PLACES)
    service.step_s = 3 * SERVED_S / NUM_TOKENS
    assert service.admission.expected_s(0, None) == pytest.approx(3 * (SERVED_S + SERVED_S / NUM_PLACES))


def test_whoever_leaves_is_counted_no_longer(service: Service) -> None:
    service.enter(NUM_PLACES)
    with contextlib.suppress(InternalError), service.admission.entered(0, None, None):
        assert service.admission.expected_s(0, None) == pytest.approx(SERVED_S + SERVED_S / 2)
        raise InternalError("internal error 5")
    assert service.admission.expected_s(0, None) == pytest.approx(SERVED_S + SERVED_S / 4)
    service.live.close()
    assert service.admission.expected_s(0, None) == 0
