"""The gate admits a request with a free id, a free place and enough time, and gets both back when it ends."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from decoder_svc.engine.figures import EngineLoad
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.request_gate import Arrival, RequestGate, Ticket
from decoder_svc.scheduling.request_output import RequestUsage
from lookonce.errors import InternalError, InvalidParameterError, OverloadedError, UnavailableError
from lookonce.identity import ANYBODY, CallerRole, Identity
from lookonce.server.admission.image_shares import ImageShares
from lookonce.server.admission.quotas import Quotas, Resource, parse_quotas
from tests.clock import Clock

NUM_PLACES = 4
MAX_IMAGE_BYTES = 1000
MAX_LIVE = 2000
SERVED_S = 2.0
NUM_TOKENS = 20
TENANT_A, TENANT_B = (Identity(name, name, CallerRole.CLIENT) for name in "ab")


@dataclass
class Service:
    """A gate with requests in it."""

    kv_cache_usage: float = 0.5
    running: int = NUM_PLACES
    waiting: int = 0
    step_s: float = 0.0
    is_healthy: bool = True
    live: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.gate = RequestGate(
            self.load,
            lambda: self.is_healthy,
            Quotas(None, CollectorRegistry()),
            DecoderMetrics(self.registry),
            ImageShares(MAX_IMAGE_BYTES),
            max_running_requests=NUM_PLACES,
            max_live_requests=MAX_LIVE,
        )

    def load(self) -> EngineLoad:
        return EngineLoad(self.running, self.waiting, 0, self.kv_cache_usage, 0, self.step_s)

    def enter(
        self, number: int = 1, *, priority: int = 0, has_s: float | None = None, identity: Identity = ANYBODY
    ) -> list[Ticket]:
        return [self.live.enter_context(self._admitted(priority, has_s, identity)) for _ in range(number)]

    def _admitted(
        self, priority: int, has_s: float | None, identity: Identity
    ) -> contextlib.AbstractContextManager[Ticket]:
        request_id = self.gate.request_id_for(identity, "", None)
        return self.gate.admitted(Arrival(identity, request_id, priority=priority, remaining_s=has_s))


@pytest.fixture
def service() -> Service:
    """The latest requests took two seconds and twenty tokens."""
    service = Service()
    for tenant in (ANYBODY.tenant, TENANT_A.tenant, TENANT_B.tenant):
        service.gate.note_served(SERVED_S, NUM_TOKENS, tenant)
    return service


# Deadlines.


def test_no_request_is_refused_while_places_are_free(service: Service) -> None:
    for _ in range(NUM_PLACES):
        assert service.gate.expected_s(0, None) == 0
        service.enter(has_s=0.001)
    assert service.gate.expected_s(0, None) > 0, "each of them has a place"


async def test_a_request_that_the_engine_has_ended_frees_its_place_before_its_answer_has_been_read(
    service: Service,
) -> None:
    tickets = service.enter(NUM_PLACES + 3)
    assert service.gate.expected_s(0, None) > 0
    for ticket in tickets:
        ticket.streams = (OutputStream(),)
    assert service.gate.expected_s(0, None) > 0, "the engine has work for all of them"
    for ticket in tickets:
        ticket.streams[0].fail(UnavailableError("encoder away"))
    assert service.gate.expected_s(0, None) == 0
    service.enter(NUM_PLACES - 1)
    assert service.gate.expected_s(0, None) == 0
    service.enter()
    assert service.gate.expected_s(0, None) > 0


def test_each_answer_of_a_request_takes_a_place(service: Service) -> None:
    request_id = service.gate.request_id_for(ANYBODY, "", None)
    several = Arrival(ANYBODY, request_id, num_choices=NUM_PLACES - 1)
    (ticket,) = [service.live.enter_context(service.gate.admitted(several))]
    assert len(set(ticket.engine_ids)) == NUM_PLACES - 1
    assert service.gate.expected_s(0, None) == 0
    service.enter()
    assert service.gate.expected_s(0, None) > 0
    # One of its answers has ended, and its place is free.
    ticket.streams = tuple(OutputStream() for _ in range(NUM_PLACES - 1))
    ticket.streams[1].fail(UnavailableError("encoder away"))
    assert service.gate.expected_s(0, None) == 0
    too_many = Arrival(ANYBODY, "more", num_choices=MAX_LIVE)
    with pytest.raises(OverloadedError), service.gate.admitted(too_many):
        pass
    with service.gate.admitted(Arrival(ANYBODY, "more", num_choices=MAX_LIVE // 2)):
        pass


def test_a_request_that_would_end_too_late_is_refused_with_advice(service: Service) -> None:
    service.enter(NUM_PLACES + 3)
    # Four are ahead of it for four places: 2 s until it runs, 2 s until it is done.
    assert service.gate.expected_s(0, None) == pytest.approx(2 * SERVED_S)
    with pytest.raises(OverloadedError, match=r"would take about 4\.0 s, and the deadline is in 4\.0 s") as caught:
        service.enter(has_s=4.0)
    assert caught.value.retry_after_s == pytest.approx(0.6)
    service.enter(has_s=5.0)


def test_a_request_without_a_deadline_is_never_refused_for_its_time(service: Service) -> None:
    service.enter(1000)
    wait_s = (1000 + 1 - NUM_PLACES) * SERVED_S / NUM_PLACES
    assert service.gate.expected_s(0, None) == pytest.approx(wait_s + SERVED_S), "all of them wait"


def test_a_short_answer_is_expected_earlier(service: Service) -> None:
    service.enter(NUM_PLACES)
    wait_s = SERVED_S / NUM_PLACES
    assert service.gate.expected_s(0, 1) == pytest.approx(wait_s + SERVED_S / NUM_TOKENS)
    assert service.gate.expected_s(0, 10_000) == pytest.approx(wait_s + SERVED_S)


def test_a_request_does_not_wait_for_those_of_lower_priority(service: Service) -> None:
    service.enter(100, priority=5)
    service.enter(priority=0, has_s=3.0)
    with pytest.raises(OverloadedError):
        service.enter(priority=5, has_s=3.0)


def test_a_tenant_with_less_than_its_share_does_not_wait_for_one_with_more(service: Service) -> None:
    service.enter(100, identity=TENANT_A)
    service.enter(1, identity=TENANT_B, has_s=SERVED_S / 0.85)
    with pytest.raises(OverloadedError):
        service.enter(1, identity=TENANT_A, has_s=SERVED_S / 0.85)
    service.enter(1, identity=TENANT_B, has_s=SERVED_S / 0.85)
    with pytest.raises(OverloadedError):
        service.enter(1, identity=TENANT_B, has_s=SERVED_S / 0.85)


def test_answers_of_another_tenant_say_nothing_about_the_length_of_ones_own(service: Service) -> None:
    for _ in range(100):
        service.gate.note_served(50 * SERVED_S, 50 * NUM_TOKENS, TENANT_A.tenant)
    service.enter(100, identity=TENANT_A)
    service.enter(1, identity=TENANT_B, has_s=SERVED_S / 0.85)
    with pytest.raises(OverloadedError):
        service.enter(1, identity=TENANT_A, has_s=SERVED_S / 0.85)
    # The first answers of a tenant only wait.
    service.enter(1, identity=Identity("x", "new", CallerRole.CLIENT), has_s=0.01)


def test_no_place_is_given_by_requests_of_higher_priority(service: Service) -> None:
    service.enter(100, identity=TENANT_A, priority=-1)
    with pytest.raises(OverloadedError):
        service.enter(1, identity=TENANT_B, has_s=SERVED_S / 0.85)
    service.enter(1, identity=TENANT_B, priority=-1, has_s=SERVED_S / 0.85)


def test_no_place_is_given_where_all_have_an_equal_share(service: Service) -> None:
    for index in range(NUM_PLACES):
        service.enter(1, identity=Identity("x", f"tenant {index}", CallerRole.CLIENT))
    with pytest.raises(OverloadedError):
        service.enter(1, identity=TENANT_A, has_s=SERVED_S / 0.85)


def test_no_request_is_refused_for_its_time_before_one_has_ended() -> None:
    service = Service()
    service.enter(1000, has_s=0.001)
    assert service.gate.expected_s(0, None) == 0
    service.gate.note_served(SERVED_S, NUM_TOKENS, "")
    with pytest.raises(OverloadedError):
        service.enter(has_s=0.001)


def test_a_full_pool_has_fewer_places(service: Service) -> None:
    service.enter(NUM_PLACES)
    assert service.gate.expected_s(0, None) == pytest.approx(SERVED_S / NUM_PLACES + SERVED_S)
    service.kv_cache_usage, service.running = 0.95, 1
    assert service.gate.expected_s(0, None) == pytest.approx(SERVED_S * NUM_PLACES + SERVED_S)


def test_the_mean_follows_the_latest_requests(service: Service) -> None:
    service.enter(NUM_PLACES)
    for _ in range(100):
        service.gate.note_served(10 * SERVED_S, NUM_TOKENS, "")
    assert service.gate.expected_s(0, None) == pytest.approx(10 * (SERVED_S + SERVED_S / NUM_PLACES), rel=0.01)


def test_steps_that_take_longer_than_they_did_count_at_once(service: Service) -> None:
    service.enter(NUM_PLACES)
    service.step_s = SERVED_S / NUM_TOKENS / 2
    assert service.gate.expected_s(0, None) == pytest.approx(SERVED_S + SERVED_S / NUM_PLACES)
    service.step_s = 3 * SERVED_S / NUM_TOKENS
    assert service.gate.expected_s(0, None) == pytest.approx(3 * (SERVED_S + SERVED_S / NUM_PLACES))


def test_a_request_that_leaves_is_no_longer_counted(service: Service) -> None:
    service.enter(NUM_PLACES)
    with contextlib.suppress(InternalError), service.gate.admitted(Arrival(ANYBODY, "r")):
        assert service.gate.expected_s(0, None) == pytest.approx(SERVED_S + SERVED_S / 2)
        raise InternalError("internal error 5")
    assert service.gate.expected_s(0, None) == pytest.approx(SERVED_S + SERVED_S / 4)
    service.live.close()
    assert service.gate.expected_s(0, None) == 0


# Places.


def test_more_live_requests_than_the_limit_are_refused_until_one_leaves(service: Service) -> None:
    service.running = 0
    service.enter(MAX_LIVE - 1)
    with service.gate.admitted(Arrival(ANYBODY, "r")):
        with pytest.raises(OverloadedError, match=f"{MAX_LIVE} requests are being served, the limit") as caught:
            service.enter()
        assert caught.value.retry_after_s > 0
    service.enter()


def test_requests_that_the_engine_still_holds_count_after_their_callers_have_gone(service: Service) -> None:
    service.waiting = MAX_LIVE - NUM_PLACES
    with pytest.raises(OverloadedError, match=f"{MAX_LIVE} requests are being served"):
        service.enter()
    service.waiting -= 1
    service.enter()


def test_requests_in_preparation_count_beside_those_that_the_engine_holds_for_callers_who_have_gone(
    service: Service,
) -> None:
    service.waiting = MAX_LIVE - NUM_PLACES - 2
    service.enter(2)
    with pytest.raises(OverloadedError, match=f"{MAX_LIVE} requests are being served"):
        service.enter()


def test_an_engine_that_hangs_with_requests_of_callers_who_have_gone_refuses_by_itself(service: Service) -> None:
    service.waiting = MAX_LIVE
    service.is_healthy = False
    # Submitting the request raises UnavailableError, which sends the caller to another replica.
    service.enter()


# Several tenants.


def test_a_tenant_alone_gets_half_of_all_places_and_two_get_a_third_each(service: Service) -> None:
    service.running = 0
    service.enter(MAX_LIVE // 2, identity=TENANT_A)
    with pytest.raises(OverloadedError, match=r"1000 of your requests are being served, 1 more"):
        service.enter(identity=TENANT_A)
    service.enter(MAX_LIVE // 4, identity=TENANT_B)
    with pytest.raises(OverloadedError, match=r"500 of your requests"):
        service.enter(identity=TENANT_B)
    with pytest.raises(OverloadedError):
        service.enter(identity=TENANT_A)


def test_a_request_for_many_answers_does_not_take_what_is_free_for_others(service: Service) -> None:
    service.running = 0
    many = [Arrival(TENANT_A, str(number), num_choices=128) for number in range(20)]
    num_taken = 0
    with contextlib.suppress(OverloadedError):
        for arrival in many:
            service.live.enter_context(service.gate.admitted(arrival))
            num_taken += arrival.num_choices
    assert MAX_LIVE // 2 - 128 < num_taken <= MAX_LIVE // 2
    service.enter(identity=TENANT_B)


def test_callers_without_tokens_may_have_all_places(service: Service) -> None:
    service.running = 0
    service.enter(MAX_LIVE)


def test_a_request_waits_for_one_of_another_tenant_for_each_of_its_own(service: Service) -> None:
    service.enter(500, identity=TENANT_A)
    # One of the running ones gives its place.
    assert service.gate.expected_s(0, None, "b") == pytest.approx(SERVED_S)
    assert service.gate.expected_s(0, None, "a") > 100 * SERVED_S
    service.enter(20, identity=TENANT_B)
    assert service.gate.expected_s(0, None, "b") == pytest.approx(
        (41 + 1 - NUM_PLACES) * SERVED_S / NUM_PLACES + SERVED_S
    )


# Ids.


@pytest.mark.parametrize("request_id", [" ", "a b", "é", "x" * 129])
def test_a_malformed_id_is_refused(service: Service, request_id: str) -> None:
    with pytest.raises(InvalidParameterError, match="request_id: must be 1 to 128"):
        service.gate.request_id_for(ANYBODY, request_id, "call-1")


def test_an_id_is_the_tenants_own_until_its_request_leaves(service: Service) -> None:
    with service.gate.admitted(Arrival(TENANT_A, "same")) as first:
        with (
            pytest.raises(InvalidParameterError, match="is being served"),
            service.gate.admitted(Arrival(TENANT_A, "same")),
        ):
            pass
        with service.gate.admitted(Arrival(TENANT_B, "same")) as other:
            assert other.request_id == first.request_id == "same"
            assert other.engine_id != first.engine_id
    with service.gate.admitted(Arrival(TENANT_A, "same")) as second:
        assert second.engine_id != first.engine_id, "the engine may still hold the first one"


def test_a_chosen_id_counts_before_that_of_the_call(service: Service) -> None:
    assert service.gate.request_id_for(TENANT_A, "chosen", "call-1") == "chosen"
    with service.gate.admitted(Arrival(TENANT_A, "chosen")):
        assert service.gate.request_id_for(TENANT_A, "chosen", "call-1") == "chosen", "`admitted` refuses it"


def test_a_request_has_the_id_of_its_call_unless_another_of_the_tenant_has_it(service: Service) -> None:
    gate = service.gate
    assert gate.request_id_for(TENANT_A, "", "session:7") == "session:7"
    with gate.admitted(Arrival(TENANT_A, "session:7")):
        made = {gate.request_id_for(TENANT_A, "", "session:7") for _ in range(2)}
        assert len(made) == 2
        assert "session:7" not in made
        assert gate.request_id_for(TENANT_B, "", "session:7") == "session:7"
    assert gate.request_id_for(TENANT_A, "", "session:7") == "session:7"


def test_a_request_without_an_id_gets_a_new_one(service: Service) -> None:
    ids = {ticket.request_id for ticket in service.enter(10)}
    assert len(ids) == 10
    assert all(ids)


def test_an_abort_marks_the_tenants_request_only_and_an_operators_all_of_that_id(service: Service) -> None:
    with service.gate.admitted(Arrival(TENANT_A, "r")) as a, service.gate.admitted(Arrival(TENANT_B, "r")) as b:
        assert service.gate.abort("r", "a") == [a]
        assert (a.is_aborted, b.is_aborted) == (True, False)
        assert service.gate.abort("r", "unknown") == service.gate.abort("other", None) == []
        assert service.gate.abort("r", None) == [a, b]
        assert b.is_aborted
    assert service.gate.abort("r", None) == []


def test_each_answer_of_a_request_counts_in_the_quota_of_calls() -> None:
    class Table:
        value = parse_quotas(b"[default]\nmax_in_flight = 4")

    quotas = Quotas(Table(), CollectorRegistry(), Clock())
    gate = RequestGate(
        lambda: EngineLoad(0, 0, 0, 0.0, 0),
        lambda: True,
        quotas,
        DecoderMetrics(CollectorRegistry()),
        ImageShares(MAX_IMAGE_BYTES),
        max_running_requests=64,
        max_live_requests=64,
    )
    with quotas.admitted(TENANT_A):
        with (
            gate.admitted(Arrival(TENANT_A, "r", num_choices=4)),
            pytest.raises(OverloadedError, match="calls are in flight"),
            quotas.admitted(TENANT_A),
        ):
            raise AssertionError
        with pytest.raises(InvalidParameterError), gate.admitted(Arrival(TENANT_A, "r", num_choices=5)):
            raise AssertionError
        # A refused request leaves nothing behind.
        with gate.admitted(Arrival(TENANT_A, "r", num_choices=4)):
            pass


# Accounts.


def test_images_and_tokens_are_charged_to_the_tenant_and_counted() -> None:
    class Table:
        value = parse_quotas(b"[default]\nimage_bytes_per_s = 100\nimage_pixels_per_s = 1000\ntokens_per_s = 10")

    registry, clock = CollectorRegistry(), Clock()
    quotas = Quotas(Table(), CollectorRegistry(), clock)
    gate = RequestGate(
        lambda: EngineLoad(0, 0, 0, 0.0, 0),
        lambda: True,
        quotas,
        DecoderMetrics(registry),
        ImageShares(MAX_IMAGE_BYTES),
        max_running_requests=1,
        max_live_requests=1,
    )
    with gate.images_in_progress(TENANT_A, 500):
        pass
    with pytest.raises(OverloadedError, match="image_bytes_per_s"):
        quotas.check(TENANT_A, Resource.IMAGE_BYTES)
    quotas.check(TENANT_A, Resource.IMAGE_PIXELS)
    gate.charge_pixels(TENANT_A, 7000)
    with pytest.raises(OverloadedError, match="image_pixels_per_s") as caught:
        quotas.check(TENANT_A, Resource.IMAGE_PIXELS)
    assert caught.value.retry_after_s == pytest.approx(5.0)
    quotas.check(TENANT_A, Resource.TOKENS)
    with gate.admitted(Arrival(TENANT_A, "r")) as ticket:
        gate.account(ticket, RequestUsage(prompt_tokens=20, completion_tokens=5))
    with pytest.raises(OverloadedError, match="tokens_per_s"):
        quotas.check(TENANT_A, Resource.TOKENS)
    for resource in Resource:
        quotas.check(TENANT_B, resource)
    assert registry.get_sample_value("lookonce_decoder_prompt_tokens_total") == 20
    assert registry.get_sample_value("lookonce_decoder_generated_tokens_total") == 5


def test_the_bytes_of_images_in_progress_are_shared_by_tenants_and_given_back(service: Service) -> None:
    """Nothing bounded them: one tenant's requests could hold 68 GB."""
    gate = service.gate
    with gate.admitted(Arrival(TENANT_A, "one")) as ticket:
        ticket.held.enter_context(gate.images_in_progress(TENANT_A, MAX_IMAGE_BYTES // 2))
        with pytest.raises(OverloadedError, match="your calls in progress"), gate.images_in_progress(TENANT_A, 1):
            pass
        with gate.images_in_progress(TENANT_A, 0), gate.images_in_progress(TENANT_B, MAX_IMAGE_BYTES // 4):
            pass
    with gate.images_in_progress(TENANT_A, MAX_IMAGE_BYTES // 2):
        pass
