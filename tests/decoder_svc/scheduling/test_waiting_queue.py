"""The waiting queue against a sorted list, its memory of cached prefixes, and its estimate of deadlines."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoder_svc.scheduling.kv_cache.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.waiting_queue import WaitingQueue
from tests.decoder_svc.scheduling.simulation import fill, request


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class CountingCache(KVCacheManager):
    """A real prefix cache that counts look-ups."""

    num_lookups = 0

    def find_prefix(self, request: Request) -> PrefixHit:
        self.num_lookups += 1
        return super().find_prefix(request)


@pytest.fixture
def cache() -> CountingCache:
    return CountingCache(num_blocks=16, block_size=4)


class QueueMachine(RuleBasedStateMachine):
    """Random additions and removals; the model is a list that is sorted again each time."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(KVCacheManager(num_blocks=4, block_size=4), lambda: 0.0)
        self.model: list[Request] = []
        self.num_made = 0

    @rule(priority=st.integers(-1, 1), arrival_s=st.integers(0, 3))
    def add(self, priority: int, arrival_s: int) -> None:
        self.num_made += 1
        new = request(f"r{self.num_made}", 5, priority=priority, arrival_s=arrival_s)
        self.queue.add(new)
        # Sorting is stable: of equal requests the one that came first stays first.
        self.model = sorted([*self.model, new], key=lambda one: (one.priority, one.arrival_s, one.request_id))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.model))
        self.model.remove(one)
        self.queue.remove(one)
        with pytest.raises(ValueError, match=r"not in list"):
            self.queue.remove(one)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def return_after_a_preemption(self, data: st.DataObject) -> None:
        """An admitted request comes back to its place, before all that are served after it."""
        one = data.draw(st.sampled_from(self.model))
        self.queue.remove(one)
        self.queue.add(one)
        rest = [other for other in self.model if other is not one]
        self.model = sorted([*rest, one], key=lambda other: (other.priority, other.arrival_s, other.request_id))

    @invariant()
    def order_is_that_of_the_model(self) -> None:
        assert len(self.queue) == len(self.model)
        assert self.queue.first(len(self.model) + 1) == self.model
        assert self.queue.first(2) == self.model[:2]
        assert [self.queue.is_head(one) for one in self.model] == [index == 0 for index in range(len(self.model))]


TestQueueMachine = QueueMachine.TestCase


def test_a_prefix_is_looked_up_once_while_the_cache_stays_as_it_is(cache: CountingCache) -> None:
    queue = WaitingQueue(cache, Clock())
    one = request("a", 9, text="same")
    queue.add(one)
    assert [queue.prefix_hit(one, may_be_old=False) for _ in range(3)] == [NO_HIT] * 3
    assert cache.num_lookups == 1


def test_a_changed_cache_is_asked_again_unless_an_old_answer_will_do(cache: CountingCache) -> None:
    queue = WaitingQueue(cache, Clock())
    one = request("a", 9, text="same")
    queue.add(one)
    assert queue.prefix_hit(one, may_be_old=True) == NO_HIT
    fill(cache, request("b", 8, text="same"))
    assert queue.prefix_hit(one, may_be_old=True) == NO_HIT
    assert queue.prefix_hit(one, may_be_old=False).num_tokens == 8
    assert queue.prefix_hit(one, may_be_old=True).num_tokens == 8


def test_a_removed_request_is_looked_up_anew_when_it_returns(cache: CountingCache) -> None:
    queue = WaitingQueue(cache, Clock())
    one = request("a", 9)
    for _ in range(2):
        queue.add(one)
        queue.prefix_hit(one, may_be_old=True)
        queue.remove(one)
    assert cache.num_lookups == 2


def test_without_a_deadline_none_is_missed(cache: CountingCache) -> None:
    clock = Clock()
    clock.now_s = 1e9
    assert not WaitingQueue(cache, clock).must_miss_deadline(request("a", 9), NO_HIT)


def test_before_the_first_step_only_a_deadline_in_the_past_is_missed(cache: CountingCache) -> None:
    clock = Clock()
    queue = WaitingQueue(cache, clock)
    one = request("a", 9, deadline_s=2.0)
    clock.now_s = 1.9
    assert not queue.must_miss_deadline(one, NO_HIT)
    clock.now_s = 2.0
    assert queue.must_miss_deadline(one, NO_HIT)


def run_step(queue: WaitingQueue, clock: Clock, num_tokens: int, seconds: float) -> None:
    queue.begin_step()
    clock.now_s += seconds
    queue.end_step(num_tokens)


def test_the_fastest_step_so_far_decides_whether_a_deadline_can_be_met(cache: CountingCache) -> None:
    clock = Clock()
    queue = WaitingQueue(cache, clock)
    run_step(queue, clock, 4, 8.0)
    run_step(queue, clock, 4, 2.0)
    run_step(queue, clock, 4, 40.0)
    # Nothing was computed: such a step has no pace.
    run_step(queue, clock, 0, 0.0)
    # Ten tokens take at least 5 s.
    assert queue.must_miss_deadline(request("a", 10, deadline_s=clock.now_s + 5.0), NO_HIT)
    assert not queue.must_miss_deadline(request("b", 10, deadline_s=clock.now_s + 5.1), NO_HIT)


def test_cached_tokens_take_no_time(cache: CountingCache) -> None:
    clock = Clock()
    queue = WaitingQueue(cache, clock)
    run_step(queue, clock, 1, 1.0)
    one = request("a", 10, deadline_s=clock.now_s + 2.5)
    assert queue.must_miss_deadline(one, NO_HIT)
    assert not queue.must_miss_deadline(one, PrefixHit((0, 1), 8))


def test_a_step_that_began_during_another_one_counts_from_its_end(cache: CountingCache) -> None:
    clock = Clock()
    queue = WaitingQueue(cache, clock)
    queue.begin_step()
    clock.now_s = 4.0
    queue.begin_step()
    queue.end_step(2)
    clock.now_s = 6.0
    queue.end_step(2)
    # One second per token, not three.
    one = request("a", 9, deadline_s=clock.now_s + 9.5)
    assert not queue.must_miss_deadline(one, NO_HIT)
    one = request("a", 9, deadline_s=clock.now_s + 8.5)
    assert queue.must_miss_deadline(one, NO_HIT)
    queue.begin_step()
    queue.fail_steps()
    queue.begin_step()
    queue.end_step(1)


def test_a_step_behind_one_that_was_read_late_has_no_pace(cache: CountingCache) -> None:
    """Its prompt chunk seemed to take no time, and no deadline was hopeless any more."""
    clock = Clock()
    queue = WaitingQueue(cache, clock)
    queue.begin_step()
    queue.begin_step()
    clock.now_s = 101.0
    queue.end_step(1, is_late=True)
    clock.now_s = 101.1
    queue.end_step(2000)
    assert queue.must_miss_deadline(request("a", 2000, deadline_s=clock.now_s + 10), NO_HIT)
    run_step(queue, clock, 2000, 5.0)
    assert not queue.must_miss_deadline(request("a", 2000, deadline_s=clock.now_s + 10), NO_HIT)
