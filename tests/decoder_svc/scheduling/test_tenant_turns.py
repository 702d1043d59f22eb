"""Tenants take turns in the queue, whatever one of them sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.tenant_turns import TenantTurns, request_to_yield


def request(tenant: str, number: int, *, num_tokens: int = 10, priority: int = 0) -> Request:
    return Request(
        RequestId(f"{tenant}{number}"),
        Prompt((1,) * num_tokens),
        SamplingParams(),
        arrival_s=float(number),
        priority=priority,
        tenant=tenant,
    )


def served(requests: list[Request]) -> list[str]:
    """Returns the ids in the order in which they are served if all have arrived."""
    turns = TenantTurns()
    for each in requests:
        turns.add(each)
    return [each.request_id for each in sorted(requests, key=lambda each: each.serving_order)]


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    assert served([request("a", number, num_tokens=1 + 99 * (number % 2)) for number in range(5)]) == [
        f"a{number}" for number in range(5)
    ]


def test_a_long_queue_delays_another_tenant_by_one_request_for_each_of_its_own() -> None:
    flood = [request("a", number) for number in range(20)]
    late = [request("b", 100 + number) for number in range(3)]
    assert served([*flood, *late])[:6] == ["a0", "b100", "a1", "b101", "a2", "b102"]


def test_long_prompts_count_for_more() -> None:
    long = [request("a", number, num_tokens=2 * (256 + 10) - 256) for number in range(3)]
    short = [request("b", 100 + number) for number in range(6)]
    assert served([*long, *short]) == ["a0", "b100", "b101", "a1", "b102", "b103", "a2", "b104", "b105"]


def test_a_tenant_that_comes_back_has_saved_nothing() -> None:
    """Turns that nobody took while a tenant had nothing to do are lost."""
    turns = TenantTurns()
    for number in range(50):
        each = request("a", number)
        turns.add(each)
        turns.serve(each)
    waiting = [request("a", 50), request("a", 51)]
    back = [request("b", 100 + number) for number in range(4)]
    for each in [*waiting, *back]:
        turns.add(each)
    order: list[str] = [each.request_id for each in sorted([*waiting, *back], key=lambda each: each.serving_order)]
    assert order.index("a50") <= 1
    assert order.index("a51") <= 3


def test_priorities_come_first_and_have_turns_of_their_own() -> None:
    low = [request("a", number, priority=5) for number in range(10)]
    other = [request("b", 50, priority=5)]
    high = [request("a", 99, priority=1)]
    assert served([*low, *other, *high])[:3] == ["a99", "a0", "b50"]


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 60), st.booleans(), st.integers(0, 1))))
def test_nothing_is_kept_of_requests_that_have_ended(steps: list[tuple[str, int, bool, int]]) -> None:
    turns = TenantTurns()
    live: list[Request] = []
    for number, (tenant, num_tokens, ends, priority) in enumerate(steps):
        each = request(tenant, number, num_tokens=num_tokens, priority=priority)
        turns.add(each)
        live.append(each)
        if ends:
            one = min(live, key=lambda each: each.serving_order)
            turns.serve(one)
            live.remove(one)
            turns.remove(one)
    assert sum(level.num_live for level in turns._levels.values()) == len(live)
    for one in list(live):
        turns.remove(one)
    assert not turns._levels


@pytest.mark.parametrize("advances", [True, False])
def test_tenants_that_went_are_forgotten(advances: bool) -> None:
    """Also while no turn is over, since every request comes from a tenant that is new."""
    turns = TenantTurns()
    turns.add(request("kept", 0))
    for number in range(10_000):
        one = request(f"tenant {number}", number)
        turns.add(one)
        if advances:
            one.turn = number
        turns.serve(one)
        turns.remove(one)
        assert len(turns._levels[0].ends) <= (2000 if advances else 8192)


def batch(*tenants: str) -> list[Request]:
    turns = TenantTurns()
    found = [request(tenant, number) for number, tenant in enumerate(tenants)]
    for each in found:
        turns.add(each)
    return found


@pytest.mark.parametrize(
    ("running", "head", "yields"),
    [
        ("aaaa", "b", "a3"),
        ("aaab", "b", "a2"),
        ("aabb", "b", None),
        ("aabb", "a", None),
        ("aaaa", "a", None),
        ("aabb", "c", "a1"),
        ("abcd", "e", None),
        ("a", "b", None),
    ],
)
def test_who_gives_a_place(running: str, head: str, yields: str | None) -> None:
    found = request_to_yield(batch(*running), request(head, 99), len(running))
    assert (None if found is None else found.request_id) == yields


def test_a_request_of_higher_priority_keeps_its_place() -> None:
    running = [request("a", number, priority=-1) for number in range(4)]
    assert request_to_yield(running, request("b", 9), 4) is None
    assert request_to_yield(running, request("b", 9, priority=-1), 4) is running[-1]
