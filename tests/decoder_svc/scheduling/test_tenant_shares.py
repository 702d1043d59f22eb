"""Tests of tenants' equal shares: some requests start before others, and some give their places."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.tenant_shares import TenantShares
from tests.decoder_svc.scheduling.simulation import finish_step, image, request, scheduler, step


def running(target: Scheduler) -> Counter[str]:
    """The number of running requests of each tenant."""
    return Counter(one.tenant for one in target._running)


def started(tenants: str) -> tuple[TenantShares, list[Request]]:
    places = TenantShares()
    found = [request(f"{tenant}{index}", 10, tenant=tenant, arrival_s=index) for index, tenant in enumerate(tenants)]
    for one in found:
        places.add(one)
        places.start(one)
    return places, found


@pytest.mark.parametrize(
    ("tenants", "waiting", "places", "yields"),
    [
        ("aaaa", "b", {"b": 2}, ["a3", "a2"]),
        ("aaab", "b", {"b": 1}, ["a2"]),
        ("aabb", "b", None, None),
        ("aabb", "a", None, None),
        ("aaaa", "a", None, None),
        ("aabb", "c", {"c": 1}, ["a1", "b3"]),
        ("aabbbb", "ac", {"c": 2}, ["b5", "b4"]),
        ("aaa", "b", {"b": 1}, ["a2", "a1"]),
        # With more tenants than places, a share is one place.
        ("abcd", "e", {"e": 1}, []),
        ("a", "b", {"b": 1}, []),
        ("aabc", "defg", {"d": 1, "e": 1, "f": 1, "g": 1}, ["a1"]),
    ],
)
def test_who_may_have_places_and_who_gives_one(
    tenants: str, waiting: str, places: dict[str, int] | None, yields: list[str] | None
) -> None:
    target, found = started(tenants)
    late = [request(f"late{tenant}", 10, tenant=tenant, arrival_s=99) for tenant in waiting]
    for one in late:
        target.add(one)
    claims = target.claims(len(tenants), 0, found)
    assert (None if claims is None else claims.num_places) == places
    if claims is not None:
        yielding = target.requests_to_yield(found, late[-1], claims.share)
        assert [one.request_id for one in yielding] == yields


def test_a_request_of_higher_priority_keeps_its_place() -> None:
    places = TenantShares()
    found = [request(f"a{index}", 4, tenant="a", priority=-1, arrival_s=index) for index in range(4)]
    for one in found:
        places.add(one)
        places.start(one)
    assert not list(places.requests_to_yield(found, request("b", 4, tenant="b"), 2))
    assert list(places.requests_to_yield(found, request("b", 4, tenant="b", priority=-1), 2)) == [found[3], found[2]]
    # Another tenant with more than its share gives a place instead.
    for index in range(3):
        found.append(request(f"c{index}", 4, tenant="c", arrival_s=10 + index))
        places.add(found[-1])
        places.start(found[-1])
    assert list(places.requests_to_yield(found, request("b", 4, tenant="b"), 2)) == [found[-1]]


def test_requests_that_come_together_get_their_places_together() -> None:
    target = scheduler(max_num_seqs=4, token_budget=100, num_blocks=200)
    for index in range(10):
        target.add(request(f"b{index}", 9, arrival_s=index, max_tokens=50, tenant="b"))
    step(target)
    assert running(target) == {"b": 4}
    for index in range(3):
        target.add(request(f"a{index}", 9, arrival_s=20 + index, max_tokens=50, tenant="a"))
    step(target)
    assert {one.request_id for one in target._running} == {"b0", "b1", "a0", "a1"}
    assert target.num_preemptions == 2
    step(target)
    assert target.num_preemptions == 2


def test_a_place_that_another_tenant_took_meanwhile_is_given_back() -> None:
    """A client sends its next request when an answer has come: too late for the place that this answer had."""
    target = scheduler(max_num_seqs=2, token_budget=100, num_blocks=200)
    for index in range(10):
        target.add(request(f"b{index}", 9, arrival_s=index, max_tokens=500, tenant="b"))
    for number in range(5):
        target.add(request(f"a{number}", 9, arrival_s=100 + number, max_tokens=2, tenant="a"))
        step(target)
        assert running(target) == {"a": 1, "b": 1}
        while target.has_requests() and running(target)["a"]:
            step(target)
        step(target)
        assert running(target) == {"b": 2}
    assert "b0" in {one.request_id for one in target._running}


def test_no_place_is_given_to_a_request_that_could_not_start() -> None:
    """Its image is still looked at. Its rows are asked for at once, though many others came before it."""
    target = scheduler(max_num_seqs=2, token_budget=100, num_blocks=200)
    for index in range(10):
        target.add(request(f"b{index}", 9, arrival_s=index, max_tokens=50, tenant="b"))
    step(target)
    target.add(request("a0", 9, (image("u", 0, 8),), arrival_s=50, max_tokens=50, tenant="a"))
    output = target.schedule()
    finish_step(target, output)
    assert [fetch.request_id for fetch in output.fetches] == ["a0"]
    for _ in range(3):
        step(target, rows_arrive=False)
        assert running(target) == {"b": 2}
    assert target.num_preemptions == 0
    (fetch,) = output.fetches
    target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows)
    step(target)
    assert running(target) == {"a": 1, "b": 1}
    assert target.num_preemptions == 1


@pytest.mark.parametrize("num_small", [3, 4, 9])
def test_more_tenants_than_places_do_not_wait_for_one_with_all_of_them(num_small: int) -> None:
    target = scheduler(max_num_seqs=4, token_budget=200, num_blocks=1000, context=400)
    for index in range(6):
        target.add(request(f"a{index}", 9, arrival_s=index, max_tokens=300, tenant="a"))
    step(target)
    assert running(target) == {"a": 4}
    for index in range(num_small):
        target.add(request(f"b{index}", 9, arrival_s=20 + index, max_tokens=2, tenant=f"b{index}"))
    for _ in range(3 * num_small):
        step(target)
        assert running(target)["a"] >= 1
    assert {one.tenant for one in target.live_requests()} == {"a"}
    # The others got no more places than those that they needed at once.
    assert target.num_preemptions == 3


def test_a_request_that_gives_its_place_to_one_of_higher_priority_keeps_its_turn() -> None:
    """Turns count tokens of one priority: those of another, which got far, say nothing about them."""
    target = scheduler(max_num_seqs=3, token_budget=400, num_blocks=1000, context=1000)
    target.add(request("hold", 9, max_tokens=900, tenant="a"))
    for index in range(30):
        target.add(request(f"a{index}", 300, arrival_s=index, max_tokens=1, tenant="a"))
    while len(target.live_requests()) > 1:
        step(target)
    numbers = itertools.count()

    def keep_waiting() -> None:
        live = sum(one.tenant == "b" for one in target.live_requests())
        for number in itertools.islice(numbers, 5 - live):
            target.add(request(f"b{number}", 9, arrival_s=50 + number, max_tokens=9, tenant="b", priority=1))

    begun: list[RequestId] = []
    for number in range(200):
        keep_waiting()
        if number == 4:
            target.add(request("c", 9, arrival_s=60, max_tokens=1, tenant="c"))
        output = step(target)
        begun += [one.request_id for one in output.admitted if one.request_id.startswith("b")]
    assert target.num_preemptions == 1
    (twice,) = (name for name, count in Counter(begun).items() if count == 2)
    # It starts again before those that came later.
    later = int(twice[1:]) + 1
    assert begun.index(twice, begun.index(twice) + 1) < begun.index(RequestId(f"b{later}"))


def test_no_places_are_given_to_a_request_that_would_not_fit() -> None:
    """Nothing is won by sending and cancelling such requests."""
    target = scheduler(max_num_seqs=8, token_budget=400, num_blocks=100, context=400)
    for index in range(8):
        target.add(request(f"b{index}", 15, arrival_s=index, max_tokens=30, tenant="b"))
    step(target)
    assert running(target) == {"b": 8}
    for index in range(20):
        # It takes 91 blocks. Half of the others hold at least 16 of 100.
        target.add(request(f"a{index}", 362, arrival_s=50, max_tokens=2, tenant="a"))
        step(target)
        target.abort(RequestId(f"a{index}"))
    assert target.num_preemptions == 0


@pytest.mark.parametrize(("has_claimed", "turn"), [(False, 0), (True, 40)])
def test_places_that_were_given_count_also_for_a_request_that_is_cancelled(has_claimed: bool, turn: int) -> None:
    target, _ = started("aaaa")
    cancelled, hold, later = (request(f"b{index}", 40, tenant="b", max_tokens=2) for index in range(3))
    target.add(cancelled)
    target.add(hold)
    cancelled.has_claimed = has_claimed
    target.end(cancelled, has_run=False)
    target.add(later)
    assert later.turn == hold.turn + turn


def test_few_but_long_requests_have_no_more_than_their_share_of_the_work() -> None:
    """With one request in flight at a time, a tenant could otherwise always go first."""
    target = scheduler(max_num_seqs=4, token_budget=200, num_blocks=400, context=400)
    numbers = itertools.count()

    def keep_busy(tenant: str, number: int, num_tokens: int) -> None:
        live = sum(one.tenant == tenant for one in target.live_requests())
        for _ in range(number - live):
            index = next(numbers)
            target.add(request(f"{tenant}{index}", num_tokens, arrival_s=index, max_tokens=2, tenant=tenant))

    taken: Counter[str] = Counter()
    for _ in range(300):
        keep_busy("long", 1, 198)
        keep_busy("short", 12, 4)
        for chunk in step(target).chunks:
            taken["long" if chunk.request_id.startswith("long") else "short"] += chunk.num_tokens
    assert 0.5 < taken["long"] / taken["short"] < 2


@pytest.mark.parametrize("num_places", [4, 8])
def test_long_answers_count_for_what_they_become(num_places: int) -> None:
    """Each counts for 256 tokens when it arrives. A tenant with short ones must not be ahead of them by the rest."""
    target = scheduler(max_num_seqs=num_places, token_budget=400, num_blocks=8000, context=1000)
    numbers = itertools.count()
    added: dict[RequestId, int] = {}

    def keep_busy(tenant: str, number: int, num_tokens: int, max_tokens: int, now: int) -> None:
        live = sum(one.tenant == tenant for one in target.live_requests())
        for index in itertools.islice(numbers, number - live):
            new = request(f"{tenant}{index}", num_tokens, arrival_s=now, max_tokens=max_tokens, tenant=tenant)
            target.add(new)
            added[new.request_id] = now

    waits = []
    for now in range(3000):
        keep_busy("long", 8 * num_places, 9, 900, now)
        if now > 20:
            keep_busy("short", num_places // 4, 24, 16, now)
        waits += [now - added[one.request_id] for one in step(target).admitted if one.request_id.startswith("short")]
    # Alone, the tenant would have as many answers: each takes 16 steps.
    assert len(waits) > (3000 - 20) / 17 * (num_places // 4)
    assert max(waits) <= 3, sorted(waits)[-20:]


def test_blocks_are_shared_like_places() -> None:
    target = scheduler(max_num_seqs=8, token_budget=100, num_blocks=20)
    for index in range(8):
        target.add(request(f"b{index}", 15, arrival_s=index, max_tokens=4, tenant="b"))
    step(target)
    num_before = running(target)["b"]
    assert num_before == 5
    target.add(request("a0", 15, arrival_s=50, max_tokens=4, tenant="a"))
    step(target)
    assert running(target)["a"] == 1
    while target.has_requests():
        step(target)


def test_tenants_within_their_share_do_not_wait() -> None:
    """Random traffic of text, checked by counting: a tenant with requests waiting runs at least its share."""
    for seed in range(40):
        rng = random.Random(seed)
        num_places = rng.randint(2, 9)
        target = scheduler(max_num_seqs=num_places, token_budget=1000, num_blocks=2000)
        names = "abc"[: rng.randint(2, 3)]
        order: dict[str, list[RequestId]] = {name: [] for name in names}
        begun: dict[str, list[RequestId]] = {name: [] for name in names}
        for number in range(150):
            for name in names:
                for index in range(rng.choice((0, 0, 0, 1, 1, 5))):
                    new = request(
                        f"{name}{number}.{index}", 6, arrival_s=number + index / 10, max_tokens=6, tenant=name
                    )
                    target.add(new)
                    order[name].append(new.request_id)
            output = target.schedule()
            live = Counter(one.tenant for one in target.live_requests())
            share = num_places // max(1, len(live))
            for name, num_live in live.items():
                assert running(target)[name] >= min(share, num_live), f"seed {seed}, step {number}, tenant {name}"
            for one in output.admitted:
                name = one.request_id[0]
                if one.request_id not in begun[name]:
                    begun[name].append(one.request_id)
            finish_step(target, output)
        for name in names:
            assert begun[name] == order[name][: len(begun[name])]
