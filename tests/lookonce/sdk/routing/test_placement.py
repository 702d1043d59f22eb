"""Equal contents go to one replica, no replica has too many requests, and few contents move when replicas change."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.sdk.routing import placement
from lookonce.sdk.routing.placement import Placement, rank

ADDRESSES = [f"10.0.0.{number}:50051" for number in range(1, 9)]


def alone(affinity: bytes, addresses: list[str]) -> str:
    """Returns the place of a content while nothing else runs."""
    return Placement().take(affinity, addresses)


@given(st.binary(min_size=1, max_size=64), st.permutations(ADDRESSES))
def test_the_order_of_addresses_does_not_matter(affinity: bytes, addresses: list[str]) -> None:
    assert alone(affinity, addresses) == alone(affinity, ADDRESSES)


def test_a_rank_is_the_same_in_every_version() -> None:
    """Clients of two versions would else send one picture to two replicas."""
    assert rank(b"0123456789abcdef", "10.0.0.1:50051").hex() == "aabce4f7c326b8ae"


def test_contents_spread_evenly_and_only_those_of_a_replica_that_has_gone_move() -> None:
    contents = [random.Random(number).randbytes(16) for number in range(4000)]
    before = {content: alone(content, ADDRESSES) for content in contents}
    counts = Counter(before.values())
    assert len(counts) == 8
    assert all(400 < count < 600 for count in counts.values())
    fewer = ADDRESSES[:-1]
    after = {content: alone(content, fewer) for content in contents}
    moved = {content for content in contents if before[content] != after[content]}
    assert moved == {content for content in contents if before[content] == ADDRESSES[-1]}
    assert len({after[content] for content in moved}) == 7, "they spread over all others"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200),
    st.integers(2, 8),
)
def test_random_requests_are_placed_as_an_independent_model_says(
    steps: list[tuple[int, bool]], num_replicas: int
) -> None:
    """Contents 0 to 3 arrive, or the oldest request ends."""
    addresses = ADDRESSES[:num_replicas]
    placed = Placement()
    running: list[str] = []
    for content, ends in steps:
        if ends and running:
            placed.give_back(running.pop(0))
            continue
        key = bytes([content]) * 16
        order = sorted(
            addresses, key=lambda one: -int.from_bytes(blake2b(one.encode(), key=key, digest_size=8).digest())
        )
        most = max(4, math.ceil((len(running) + 1) * 5 / 4 / num_replicas))
        expected = next(one for one in order if running.count(one) + 1 <= most)
        assert placed.take(key, addresses) == expected
        running.append(expected)
        assert [placed.num_own(one) for one in addresses] == [running.count(one) for one in addresses]


def test_a_popular_content_uses_all_replicas() -> None:
    placed = Placement()
    taken = Counter(placed.take(b"popular", ADDRESSES[:4]) for _ in range(100))
    assert max(taken.values()) <= math.ceil(1.25 * 100 / 4)
    assert min(taken.values()) >= 1


def test_a_few_questions_at_once_about_one_picture_stay_together() -> None:
    """An eighth of four requests would be less than one for each."""
    placed = Placement()
    assert len({placed.take(b"picture", ADDRESSES) for _ in range(4)}) == 1
    assert placed.take(b"picture", ADDRESSES) != alone(b"picture", ADDRESSES)


def test_requests_of_other_clients_count(monkeypatch: pytest.MonkeyPatch) -> None:
    first = alone(b"content", ADDRESSES[:2])
    (second,) = set(ADDRESSES[:2]) - {first}
    placed = Placement()
    assert placed.take(b"content", ADDRESSES[:2]) == first
    # One of the eleven is this client's own.
    placed.report(first, 11)
    assert placed.take(b"content", ADDRESSES[:2]) == second
    placed.report(second, 11)
    assert placed.take(b"content", ADDRESSES[:2]) == first
    placed.report(first, 500)
    monkeypatch.setattr(placement, "_REPORT_AGE_S", -1.0)
    assert placed.take(b"content", ADDRESSES[:2]) == first, "old reports do not count"


def test_a_replica_that_failed_rests_longer_each_time_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    placed = Placement()
    first = alone(b"content", ADDRESSES[:2])
    (second,) = set(ADDRESSES[:2]) - {first}

    def taken() -> str:
        address = placed.take(b"content", ADDRESSES[:2])
        placed.give_back(address)
        return address

    rests = []
    for _ in range(6):
        placed.failed(first)
        began_s = now_s
        while taken() == second:
            now_s += 0.5
        rests.append(now_s - began_s)
    assert rests == [2, 4, 8, 16, 30, 30]
    placed.succeeded(first)
    placed.failed(first)
    assert taken() == second
    now_s += 2
    assert taken() == first
    placed.failed(first)
    placed.failed(second)
    assert taken() == first, "when all have failed, none rests"


def test_a_garbage_collection_in_the_midst_of_a_choice_may_end_other_requests() -> None:
    """A stream that nobody refers to gives its place back in whichever thread collects it."""
    placed = Placement()
    held = placed.take(b"content", ADDRESSES[:2])

    class Collecting(list[str]):
        def __iter__(self) -> Iterator[str]:
            placed.give_back(held)
            return super().__iter__()

    assert placed.take(b"content", Collecting(ADDRESSES[:2])) == held
    assert placed.num_own(held) == 1


def test_a_replica_that_went_begins_anew() -> None:
    placed = Placement()
    address = placed.take(b"content", ADDRESSES[:2])
    placed.report(address, 100)
    placed.give_back(address)
    placed.forget(address)
    assert placed.take(b"content", ADDRESSES[:2]) == address
