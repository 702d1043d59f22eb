from __future__ import annotations

import pytest

from decoder_svc.request import FinishReason, RequestState, RowSource
from tests.decoder_svc.scheduling import chunks, finish_step, image, key, request, scheduler, step


def test_prompt_and_decode_share_one_budget() -> None:
    target = scheduler(token_budget=10)
    target.add(request("a", 6, arrival_s=1))
    target.add(request("b", 12, arrival_s=2))
    assert chunks(step(target)) == [("a", 0, 6), ("b", 0, 4)]
    assert chunks(step(target)) == [("a", 6, 1), ("b", 4, 8)]
    assert chunks(step(target)) == [("a", 7, 1), ("b", 12, 1)]


def test_only_the_chunk_that_reaches_the_last_token_samples() -> None:
    target = scheduler(token_budget=4)
    target.add(request("a", 10))
    assert [[chunk.samples for chunk in step(target).chunks] for _ in range(3)] == [[False], [False], [True]]


def test_new_blocks_are_named_once_and_cover_the_tokens() -> None:
    target = scheduler(token_budget=6)
    target.add(request("a", 10))
    first, second = step(target), step(target)
    assert len(first.chunks[0].new_block_ids) == 2
    assert len(second.chunks[0].new_block_ids) == 1
    assert not set(first.chunks[0].new_block_ids) & set(second.chunks[0].new_block_ids)


def test_text_before_an_image_is_computed_while_its_rows_travel() -> None:
    target = scheduler()
    target.add(request("a", 12, (image("x", 3, 6),)))
    output = step(target, rows_arrive=False)
    assert chunks(output) == [("a", 0, 3)]
    assert [fetch.key for fetch in output.fetches] == [key("x")]
    assert chunks(step(target, rows_arrive=False)) == []
    assert target.rows_arrived(key("x"), RowSource.ENCODED)
    assert chunks(step(target)) == [("a", 3, 9)]


def test_a_request_without_its_rows_never_blocks_those_behind() -> None:
    target = scheduler()
    target.add(request("slow", 8, (image("x", 0, 8),), arrival_s=1))
    target.add(request("text", 5, arrival_s=2))
    output = step(target, rows_arrive=False)
    assert chunks(output) == [("text", 0, 5)]
    assert target.num_waiting_for_rows == 1


def test_one_fetch_serves_all_requests_for_a_picture() -> None:
    target = scheduler()
    target.add(request("a", 8, (image("x", 2, 4),), arrival_s=1))
    target.add(request("b", 8, (image("x", 3, 4),), arrival_s=2))
    assert len(step(target, rows_arrive=False).fetches) == 1
    target.rows_arrived(key("x"), RowSource.ENCODED)
    output = step(target)
    assert output.fetches == ()
    assert chunks(output) == [("a", 2, 6), ("b", 3, 5)]


def test_usage_tells_encoded_from_shared_and_counts_once() -> None:
    target = scheduler(token_budget=32)
    first = request("a", 12, (image("x", 1, 4), image("x", 6, 4)), arrival_s=1, max_tokens=1)
    target.add(first)
    step(target), step(target)
    assert (first.usage.encoded_image_tokens, first.usage.cached_image_tokens) == (4, 4)
    second = request("b", 8, (image("x", 1, 4),), arrival_s=2, max_tokens=1)
    third = request("c", 8, (image("y", 1, 4),), arrival_s=2, max_tokens=1)
    target.add(second)
    target.add(third)
    step(target, source=RowSource.SHARED_CACHE), step(target)
    assert (second.usage.encoded_image_tokens, second.usage.cached_image_tokens) == (0, 4)
    assert (third.usage.encoded_image_tokens, third.usage.cached_image_tokens) == (0, 4)


def test_preemption_frees_the_latest_and_progress_goes_on() -> None:
    target = scheduler(num_blocks=4, token_budget=16)
    early = request("early", 7, arrival_s=1, max_tokens=6)
    late = request("late", 7, arrival_s=2, max_tokens=6)
    target.add(early)
    target.add(late)
    for _ in range(40):
        if not target.has_requests():
            break
        step(target)
    assert early.num_preemptions == 0
    assert late.num_preemptions >= 1
    assert early.finish_reason is late.finish_reason is FinishReason.LENGTH
    assert len(late.output_token_ids) == 6


def test_a_preempted_request_comes_back_with_its_generated_tokens() -> None:
    target = scheduler(num_blocks=4, token_budget=16)
    late = request("late", 7, arrival_s=2, max_tokens=6)
    target.add(request("early", 7, arrival_s=1, max_tokens=6))
    target.add(late)
    returned = []
    for _ in range(40):
        returned += [item for item in step(target).admitted if item.request_id == "late"]
    assert len(returned) == 2
    assert returned[1].num_prompt_tokens == 7
    assert len(returned[1].token_ids) > 7


def test_priority_goes_before_arrival() -> None:
    target = scheduler(token_budget=4)
    target.add(request("normal", 4, arrival_s=1))
    target.add(request("urgent", 4, arrival_s=2, priority=-1))
    assert chunks(step(target)) == [("urgent", 0, 4)]


def test_running_batch_is_bounded() -> None:
    target = scheduler(max_num_seqs=2, token_budget=100)
    for index in range(5):
        target.add(request(f"r{index}", 4, arrival_s=index, max_tokens=2))
    assert len(step(target).chunks) == 2
    assert target.num_waiting == 3


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_in_every_state_returns_to_the_baseline(num_steps: int) -> None:
    target = scheduler(token_budget=4)
    victim = request("a", 9, (image("x", 2, 4),))
    target.add(victim)
    for _ in range(num_steps):
        step(target)
    assert target.abort(victim.request_id) is victim
    assert victim.state is RequestState.FINISHED
    assert target.abort(victim.request_id) is None
    step(target)
    assert not target.has_requests()
    assert target.encoder_cache.num_uses() == 0


def test_stop_token_ends_a_request_but_not_before_min_tokens() -> None:
    target = scheduler()
    stopped = request("a", 3, max_tokens=9, stop_token_ids=frozenset({7}))
    target.add(stopped)
    updates = finish_step(target, target.schedule(), token_id=7)
    assert updates[0].finish_reason is FinishReason.STOP


def test_context_limit_ends_a_request() -> None:
    target = scheduler(context=5)
    target.add(request("a", 4, max_tokens=9))
    updates = finish_step(target, target.schedule())
    assert updates[0].finish_reason is FinishReason.LENGTH


def test_failed_rows_end_only_requests_that_cannot_go_on() -> None:
    target = scheduler()
    by_digest = request("digest", 6, (image("x", 1, 4, data=None),), arrival_s=1)
    with_file = request("file", 6, (image("x", 1, 4),), arrival_s=2)
    target.add(by_digest)
    target.add(with_file)
    output = step(target, rows_arrive=False)
    assert output.fetches[0].data is None
    assert target.rows_failed(key("x"), had_data=False) == [by_digest]
    retry = step(target, rows_arrive=False)
    assert retry.fetches[0].data is not None
    assert target.rows_failed(key("x"), had_data=True) == [with_file]


def test_running_requests_displace_the_rows_of_waiting_ones() -> None:
    target = scheduler(cache_rows=4, max_num_seqs=1, token_budget=4)
    runs = request("runs", 12, (image("x", 4, 4), image("y", 8, 4)), arrival_s=1)
    target.add(runs)
    target.add(request("waits", 4, (image("z", 0, 4),), arrival_s=2))
    for _ in range(12):
        step(target)
        if runs.state is RequestState.FINISHED:
            break
    assert runs.state is RequestState.FINISHED


def test_evicted_rows_are_announced_unless_asked_for_again() -> None:
    target = scheduler(cache_rows=4, token_budget=32)
    target.add(request("a", 6, (image("x", 1, 4),), max_tokens=1))
    step(target), step(target)
    target.add(request("b", 6, (image("y", 1, 4),), max_tokens=1, arrival_s=1))
    assert step(target).evicted_keys == (key("x"),)


def test_rows_that_arrive_after_everybody_left_stay_for_the_next() -> None:
    target = scheduler()
    target.add(request("a", 6, (image("x", 0, 4),)))
    step(target, rows_arrive=False)
    target.abort(request("a", 6).request_id)
    assert target.rows_arrived(key("x"), RowSource.ENCODED)
    target.add(request("b", 6, (image("x", 0, 4),)))
    output = step(target)
    assert output.fetches == ()
    assert chunks(output) == [("b", 0, 6)]
