"""Callers take turns, and each caller's items leave in the order of their numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lookonce.turns.fair_queue import CallerId, FairQueue

A, B, C = CallerId("one", "a"), CallerId("one", "b"), CallerId("other", "a")


def filled(*items: tuple[CallerId, int]) -> FairQueue[int]:
    """A queue whose items are their own numbers."""
    queue: FairQueue[int] = FairQueue()
    for caller, number in items:
        queue.put(caller, number, number)
    return queue


def served(queue: FairQueue[int]) -> list[int]:
    """Takes everything, always from the caller that is next."""
    taken = []
    while queue:
        taken.append(queue.take(queue.callers()[0]))
    return taken


def test_callers_take_turns_in_the_order_in_which_they_came() -> None:
    assert served(filled((B, 0), (B, 1), (B, 2), (A, 3), (C, 4), (A, 5))) == [0, 3, 4, 1, 5, 2]


def test_a_late_item_goes_before_those_of_its_caller_that_were_asked_for_later() -> None:
    queue = filled((A, 5), (A, 9), (A, 7), (A, 1))
    assert list(queue.waiting(A)) == [1, 5, 7, 9]
    assert list(queue.waiting(B)) == []


def test_the_oldest_item_s_caller_need_not_be_next() -> None:
    queue = filled((A, 5), (B, 1))
    assert (queue.oldest(), queue.callers()) == ((1, B), [A, B])


def test_a_discarded_item_costs_its_caller_no_turn() -> None:
    queue = filled((A, 0), (B, 1), (A, 2))
    queue.discard(A, 0)
    queue.discard(A, 0)
    queue.discard(C, 7)
    assert served(queue) == [2, 1]


def test_a_caller_without_items_is_forgotten() -> None:
    queue = filled((A, 0), (B, 1))
    queue.discard(A, 0)
    assert queue.callers() == [B]
    assert queue.clear() == [1]
    assert (len(queue), queue.callers()) == (0, [])


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 50)), unique_by=lambda item: item[1]))
def test_nothing_is_lost_and_no_caller_gets_two_more_than_another_that_waits(items: list[tuple[CallerId, int]]) -> None:
    queue = filled(*items)
    assert len(queue) == len(items)
    caller_of = {number: caller for caller, number in items}
    taken: list[int] = []
    while queue:
        counts = [sum(caller_of[number] == caller for number in taken) for caller in queue.callers()]
        assert max(counts) - min(counts) <= 1
        taken.append(queue.take(queue.callers()[0]))
    assert sorted(taken) == sorted(caller_of)
    for caller in (A, B, C):
        mine = [number for number in taken if caller_of[number] == caller]
        assert mine == sorted(mine)
