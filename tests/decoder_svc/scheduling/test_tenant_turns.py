"""Tenants take turns in the queue, whatever one of them sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.tenant_turns import TenantTurns


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
            turns.remove(one, was_served=True)
    assert sum(level.num_live for level in turns._levels.values()) == len(live)
    for one in list(live):
        turns.remove(one, was_served=False)
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
        turns.remove(one, was_served=True)
        assert len(turns._levels[0].tenants) <= (2000 if advances else 8192)


def test_an_answer_counts_for_what_it_became() -> None:
    """Two tenants have the same `max_tokens`, and one of them gets much shorter answers."""
    turns = TenantTurns()
    first = {tenant: request(tenant, number) for number, tenant in enumerate("ab")}
    for each in first.values():
        turns.add(each)
        turns.serve(each)
    first["a"].token_ids += [7] * 6
    first["b"].token_ids += [7] * 256
    waiting = request("c", 5)
    turns.add(waiting)
    for each in first.values():
        turns.remove(each, was_served=True)
    later = {tenant: request(tenant, 10 + number) for number, tenant in enumerate("ab")}
    for each in later.values():
        turns.add(each)
    assert later["b"].turn - later["a"].turn == 250


def test_a_request_that_was_never_served_counts_for_nothing() -> None:
    turns = TenantTurns()
    kept = request("b", 0)
    turns.add(kept)
    gone = [request("a", 1 + number) for number in range(20)]
    for each in gone:
        turns.add(each)
    for each in gone:
        turns.remove(each, was_served=False)
    later = request("a", 50)
    turns.add(later)
    assert later.turn == gone[-1].turn


def test_the_order_within_a_tenant_stays_when_answers_become_short() -> None:
    turns = TenantTurns()
    all_of_them = [request("a", number) for number in range(6)]
    for each in all_of_them[:5]:
        turns.add(each)
    turns.serve(all_of_them[0])
    turns.remove(all_of_them[0], was_served=True)
    turns.add(all_of_them[5])
    found = [each.serving_order for each in all_of_them[1:]]
    assert found == sorted(found)


def test_short_answers_make_up_for_long_ones() -> None:
    """The surplus that the turns of a tenant do not know of is the sum of all differences, and known from then on."""
    turns = TenantTurns()
    many = [request("a", number) for number in range(6)]
    for each in many:
        turns.add(each)
    for each in many[:4]:
        turns.serve(each)
    found = []
    for each, num_tokens in zip(many[:3], (256 + 100, 256 - 70, 256 + 40), strict=True):
        each.token_ids += [7] * num_tokens
        turns.remove(each, was_served=True)
        found.append(turns.unseen_surplus("a", 0))
    assert found == [100, 30, 70]
    later = request("a", 10)
    turns.add(later)
    turns.serve(later)
    assert turns.unseen_surplus("a", 0) == 0
    turns.serve(many[4])
    assert turns.unseen_surplus("a", 0) == 0, "it got its turn before a later one that was served"
