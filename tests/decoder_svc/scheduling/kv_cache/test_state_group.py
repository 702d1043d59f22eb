"""Recurrent layers in the prefix cache: where snapshots are taken, and what a hit continues."""

from __future__ import annotations

from decoder_svc.scheduling.kv_cache.kv_cache_manager import NO_HIT
from decoder_svc.scheduling.kv_cache.kv_pool_size import KVPoolConfig, StateCosts, state_group_size
from decoder_svc.scheduling.kv_cache.state_group import StateGroupSize
from decoder_svc.scheduling.request import CacheScope, RequestId
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from tests.decoder_svc.scheduling.simulation import chunks, image, request, scheduler, step

# Blocks have four tokens.
INTERVAL = 2


def hybrid(num_snapshots: int = 8, num_slots: int = 8, token_budget: int = 64) -> Scheduler:
    return scheduler(token_budget=token_budget, states=StateGroupSize(num_slots, num_snapshots, INTERVAL))


def taken(target: Scheduler) -> list[list[int]]:
    """Runs a step; returns where each of its chunks takes snapshots."""
    uses = [chunk.states for chunk in step(target).chunks]
    return [[num_tokens for num_tokens, _ in use.taken] for use in uses if use is not None]


def test_snapshots_are_taken_every_few_blocks_and_before_the_last_token_of_the_prompt() -> None:
    target = hybrid()
    target.add(request("a", 21, max_tokens=5))
    assert taken(target) == [[8, 16, 20]]
    # The answer reaches the end of the sixth block with its fourth token.
    assert [taken(target) for _ in range(4)] == [[[]], [[]], [[24]], [[]]]


def test_a_later_request_continues_the_last_snapshot_of_what_it_shares() -> None:
    target = hybrid()
    target.add(request("a", 21, text="t", max_tokens=1))
    step(target)
    target.add(request("b", 15, text="t", max_tokens=1))
    target.add(request("c", 21, text="t", max_tokens=1))
    target.add(request("d", 20, text="t", max_tokens=1))
    output = step(target)
    assert chunks(output) == [("b", 8, 7), ("c", 20, 1), ("d", 16, 4)]
    assert all(chunk.states is not None and chunk.states.loaded is not None for chunk in output.chunks)


def test_at_most_one_interval_of_a_long_cached_prompt_is_computed_again() -> None:
    """A prompt of 8192 tokens whose first nine tenths are cached, with the sizes of a decoder."""
    num_tokens, num_equal, interval_tokens = 8192, 7373, 256
    # Qwen3.5's sizes: eighteen layers with 16 matrices of 128 × 128, and six with two heads of 256.
    costs = StateCosts(18 << 20, 16 * 12_288, block_size=16)
    wish = KVPoolConfig(None, 64 << 30, 0.5)
    states = state_group_size(wish, costs, free_bytes=0, max_num_seqs=50, max_useful_blocks=50 * 600)
    assert states == StateGroupSize(50, 200, interval_tokens // 16)
    target = scheduler(token_budget=2048, num_blocks=2000, context=9000, block_size=16, states=states)
    target.add(request("a", num_tokens, text="t", max_tokens=1))
    assert [step(target).num_scheduled_tokens for _ in range(5)] == [2048, 2048, 2048, 2048, 0]
    other = request("b", num_tokens, text="t", max_tokens=1)
    other.token_ids[num_equal:] = range(num_tokens - num_equal)
    target.add(other)
    start = step(target).chunks[0].start
    assert other.usage.cached_prompt_tokens == start == 7168
    assert num_equal - start <= interval_tokens


def test_small_states_have_a_snapshot_for_every_block_and_as_many_as_there_are_blocks() -> None:
    """LFM2's sizes: ten layers with windows of two times 2048 elements, and six with eight heads of 64."""
    costs = StateCosts(10 * 2 * 2048 * 2, 16 * 12_288, block_size=16)
    sizes = {"free_bytes": 64 << 30, "max_num_seqs": 8, "max_useful_blocks": 4000}
    assert state_group_size(KVPoolConfig(None, None, 0.5), costs, **sizes) == StateGroupSize(8, 4000, 1)
    # A quarter of little memory is less.
    few = state_group_size(KVPoolConfig(None, 400 * costs.state_bytes, 0.5), costs, **sizes)
    assert few == StateGroupSize(8, 100, 1)


def test_between_the_two_a_snapshot_takes_half_of_its_interval() -> None:
    costs = StateCosts(state_bytes=300, block_bytes=100, block_size=16)
    assert (costs.interval, costs.are_cheap) == (6, True)
    dear = StateCosts(state_bytes=900, block_bytes=100, block_size=16)
    assert (dear.interval, dear.are_cheap) == (16, False)
    # A block of more tokens than an interval may have is an interval.
    assert StateCosts(state_bytes=900, block_bytes=100, block_size=512).interval == 1


def test_without_a_snapshot_nothing_is_cached() -> None:
    target = hybrid()
    target.add(request("a", 21, text="t", max_tokens=1))
    step(target)
    pool = target.kv_cache.snapshot_pool
    assert pool is not None
    pool.reset()
    assert target.kv_cache.find_prefix(request("b", 21, text="t")) == NO_HIT


def test_requests_without_sharing_take_no_snapshots() -> None:
    target = hybrid()
    target.add(request("a", 21, cache_scope=CacheScope(bypass=True)))
    assert taken(target) == [[]]


def test_a_request_waits_for_a_free_state() -> None:
    target = hybrid(num_slots=1)
    target.add(request("a", 5, max_tokens=2))
    target.add(request("b", 5, max_tokens=2))
    assert [chunks(step(target)) for _ in range(3)] == [[("a", 0, 5)], [("a", 5, 1)], [("b", 0, 5)]]


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    target = hybrid(token_budget=12)
    for name in "abc":
        target.add(request(name, 21, text="t", max_tokens=1))
    target.add(request("other", 2, max_tokens=1))
    assert chunks(step(target)) == [("a", 0, 12)]
    # A snapshot of the last whole block is taken, so the others wait for it.
    assert chunks(step(target)) == [("a", 12, 9), ("other", 0, 2)]
    assert chunks(step(target)) == [("b", 20, 1), ("c", 20, 1)]


def test_a_request_does_not_continue_from_a_snapshot_of_a_step_that_failed() -> None:
    """It adopts the snapshot while the step runs, with blocks of an earlier request, and gets no chunk meanwhile."""
    target = scheduler(token_budget=9, num_blocks=200, states=StateGroupSize(8, 2, 4), cache_rows=4)

    def settle(output: SchedulerOutput) -> None:
        sampled = [SampledToken(chunk.request_id, 7, None) for chunk in output.chunks if chunk.samples]
        target.update(output, sampled)

    def arrive(output: SchedulerOutput) -> None:
        for fetch in output.fetches:
            target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows)

    # The blocks of a text are cached, but other snapshots have taken the place of its own.
    for name, picture, text in (("first", "u", "t"), ("other", "w", "other")):
        target.add(request(name, 60, (image(picture, 4, 4),), text=text, max_tokens=1))
        while target.has_requests():
            output = target.schedule()
            settle(output)
            arrive(output)
    for arrival_s, name in enumerate(("a", "b")):
        target.add(request(name, 60, (image("u", 4, 4),), text="t", max_tokens=1, arrival_s=arrival_s))
    states = target.kv_cache._states
    assert states is not None
    in_flight = None
    for _ in range(30):
        output = target.schedule()
        if in_flight is not None and RequestId("b") in states._to_load:
            break
        if in_flight is not None:
            settle(in_flight)
        target.advance(output)
        in_flight = output
        arrive(output)
    assert in_flight is not None
    taken = {copy for chunk in in_flight.chunks if chunk.states is not None for _, copy in chunk.states.taken}
    assert states._to_load[RequestId("b")] in taken
    target.fail_step(in_flight, output)
    (chunk,) = target.schedule().chunks
    assert (chunk.request_id, chunk.start) == ("b", 0)
    assert chunk.states is not None
    assert chunk.states.loaded is None


def test_running_requests_with_equal_tokens_take_each_snapshot_once() -> None:
    """Both are in the middle of their prompts when their tokens become equal blocks."""
    target = hybrid(token_budget=8)
    target.add(request("a", 5, text="t", max_tokens=9))
    target.add(request("b", 5, text="t", max_tokens=9, arrival_s=1))
    seen = [taken(target) for _ in range(11)]
    assert sum(snapshots.count(8) for one in seen for snapshots in one) == 1


def test_a_full_pool_of_snapshots_that_are_in_use_takes_no_more() -> None:
    target = hybrid(num_snapshots=2)
    target.add(request("a", 21, max_tokens=1))
    assert taken(target) == [[8, 16]]
