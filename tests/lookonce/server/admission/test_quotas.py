"""On average a tenant gets its rate, never more calls in flight than its limit, and no other tenant's share."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from lookonce.errors import InvalidParameterError, OverloadedError
from lookonce.identity import ANYBODY, CallerRole, Identity
from lookonce.server.admission.quotas import Quotas, Resource, parse_quotas
from tests.clock import Clock

A, B = (Identity(name, name, CallerRole.CLIENT) for name in "ab")


class Table:
    """A quota file with this content."""

    def __init__(self, text: str) -> None:
        self.value = parse_quotas(text.encode())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def admit(quotas: Quotas, identity: Identity) -> float | None:
    """Makes a call. Returns None if it is admitted, else the advised delay in seconds."""
    try:
        with quotas.admitted(identity):
            return None
    except OverloadedError as error:
        return error.retry_after_s


def test_calls_at_a_time_are_bounded_for_each_tenant(registry: CollectorRegistry, clock: Clock) -> None:
    quotas = Quotas(Table("[default]\nmax_in_flight = 2"), registry, clock)
    with contextlib.ExitStack() as calls:
        for _ in range(2):
            calls.enter_context(quotas.admitted(A))
        assert admit(quotas, A) is not None
        assert admit(quotas, B) is None
    assert admit(quotas, A) is None
    assert registry.get_sample_value("lookonce_quota_refusals_total", {"limit": "max_in_flight"}) == 1


def test_several_answers_of_a_call_count_as_calls(registry: CollectorRegistry, clock: Clock) -> None:
    quotas = Quotas(Table("[default]\nmax_in_flight = 4"), registry, clock)
    with quotas.admitted(A), quotas.more_in_flight(A, 2, "n"):
        assert admit(quotas, A) is None
        with quotas.admitted(A):
            assert admit(quotas, A) is not None
            with pytest.raises(OverloadedError, match="4 calls are in flight"), quotas.more_in_flight(A, 1, "n"):
                raise AssertionError
        with quotas.admitted(B), quotas.more_in_flight(B, 3, "n"):
            pass
    with quotas.admitted(A), quotas.more_in_flight(A, 3, "n"):
        pass
    with pytest.raises(InvalidParameterError, match=r"n: must be at most 4"), quotas.more_in_flight(A, 4, "n"):
        raise AssertionError
    assert admit(quotas, A) is None


@given(
    rate=st.floats(0.5, 1000),
    waits_s=st.lists(st.floats(0, 3), min_size=1, max_size=60),
    amounts=st.lists(st.floats(0, 5000), min_size=60, max_size=60),
)
def test_no_tenant_gets_more_than_its_rate_and_one_call(
    rate: float, waits_s: list[float], amounts: list[float]
) -> None:
    clock = Clock()
    quotas = Quotas(Table(f"[default]\ntokens_per_s = {rate!r}"), CollectorRegistry(), clock)
    taken, largest, began_s = 0.0, 0.0, clock.now_s
    for wait_s, amount in zip(waits_s, amounts, strict=False):
        clock.now_s += wait_s
        if admit(quotas, A) is None:
            quotas.charge(A, Resource.TOKENS, amount)
            taken, largest = taken + amount, max(largest, amount)
            # The two seconds in the full bucket, the refill since then, and a debt of one call.
            assert taken <= rate * (2 + clock.now_s - began_s) * 1.0001 + largest + 1e-6


def test_the_advised_delay_is_long_enough_and_not_too_long(registry: CollectorRegistry, clock: Clock) -> None:
    quotas = Quotas(Table("[default]\nimage_bytes_per_s = 1000"), registry, clock)
    assert admit(quotas, A) is None
    quotas.charge(A, Resource.IMAGE_BYTES, 7000)
    delay_s = admit(quotas, A)
    assert delay_s is not None
    assert delay_s == pytest.approx(5)
    clock.now_s += delay_s - 0.01
    assert admit(quotas, A) is not None
    clock.now_s += 0.02
    assert admit(quotas, A) is None


def test_tenants_that_are_named_have_quotas_of_their_own(registry: CollectorRegistry, clock: Clock) -> None:
    quotas = Quotas(Table("[default]\nrequests_per_s = 1\n[tenants.b]\nrequests_per_s = 100"), registry, clock)
    assert [admit(quotas, A) is None for _ in range(4)] == [True, True, False, False]
    assert all(admit(quotas, B) is None for _ in range(100))


@pytest.mark.parametrize("role", [CallerRole.SERVICE, CallerRole.OPERATOR])
def test_services_and_operators_have_none(registry: CollectorRegistry, clock: Clock, role: CallerRole) -> None:
    quotas = Quotas(Table("[default]\nrequests_per_s = 1\nmax_in_flight = 1"), registry, clock)
    assert all(admit(quotas, Identity("x", "a", role)) is None for _ in range(10))


def test_pixels_are_a_rate_of_their_own(registry: CollectorRegistry, clock: Clock) -> None:
    quotas = Quotas(Table("[tenants.a]\nimage_pixels_per_s = 1_000_000"), registry, clock)
    assert [quotas.has_limit(identity, Resource.IMAGE_PIXELS) for identity in (A, B, ANYBODY)] == [True, False, False]
    assert not quotas.has_limit(A, Resource.IMAGE_BYTES)
    for identity in (A, B):
        quotas.charge(identity, Resource.IMAGE_BYTES, 34)
        quotas.charge(identity, Resource.IMAGE_PIXELS, 49_000_000)
    assert admit(quotas, A) == pytest.approx(47)
    assert admit(quotas, B) is None
    assert registry.get_sample_value("lookonce_quota_refusals_total", {"limit": "image_pixels_per_s"}) == 1


def test_without_a_table_there_are_no_limits(registry: CollectorRegistry) -> None:
    quotas = Quotas(None, registry)
    quotas.charge(A, Resource.TOKENS, 1e12)
    assert admit(quotas, A) is None
    assert admit(quotas, ANYBODY) is None
    assert not quotas.has_limit(A, Resource.TOKENS)


def test_idle_tenants_are_forgotten_and_those_in_debt_are_not(
    registry: CollectorRegistry, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookonce.server.admission.quotas._MAX_TENANTS", 10)
    quotas = Quotas(Table("[default]\ntokens_per_s = 1"), registry, clock)
    assert admit(quotas, A) is None
    quotas.charge(A, Resource.TOKENS, 1e6)
    for number in range(1000):
        assert admit(quotas, Identity("x", f"t{number}", CallerRole.CLIENT)) is None
        clock.now_s += 3
    assert len(quotas._usages) <= 11
    assert admit(quotas, A) is not None


@pytest.mark.parametrize(
    "text",
    [
        "[default]\nrequests_per_s = 0",
        "[default]\nmax_in_flight = -1",
        "[tenants]\na = 1",
        "[other]",
        "x",
        "[default]\ny=1",
    ],
)
def test_a_table_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_quotas(text.encode())


def test_an_empty_table_has_no_limits() -> None:
    assert parse_quotas(b"").default.max_in_flight is None
