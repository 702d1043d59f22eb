from __future__ import annotations

from typing import Any

import pytest

from decoder_svc.scheduling.request import CacheScope, Request, RequestId, RequestState
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from lookonce.content_key import ContentKey
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import chunks, finish_step, image, key, request, rows, scheduler, step


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
    assert (first.chunks[0].block_start, second.chunks[0].block_start) == (0, 2)
    assert (len(first.chunks[0].block_ids), len(second.chunks[0].block_ids)) == (2, 1)
    assert not set(first.chunks[0].block_ids) & set(second.chunks[0].block_ids)


def test_text_before_an_image_is_computed_while_its_rows_travel() -> None:
    target = scheduler()
    target.add(request("a", 12, (image("x", 3, 6),)))
    output = step(target, rows_arrive=False)
    assert chunks(output) == [("a", 0, 3)]
    assert [fetch.key for fetch in output.fetches] == [key("x")]
    assert chunks(step(target, rows_arrive=False)) == []
    assert target.rows_arrived(key("x"), rows(0, 6), num_encoded_rows=6)
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
    target.rows_arrived(key("x"), rows(0, 4), num_encoded_rows=4)
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
    step(target, are_encoded=False), step(target)
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


def test_answers_go_on_while_a_prompt_of_higher_priority_is_computed() -> None:
    target = scheduler(token_budget=8)
    for name in ("low", "lower"):
        target.add(request(name, 4, max_tokens=9, priority=1))
    step(target)
    target.add(request("high", 30, priority=0))
    step(target)
    during = [chunks(step(target)) for _ in range(4)]
    assert [[(name, num_tokens) for name, _, num_tokens in one] for one in during] == [
        [("high", 6), ("low", 1), ("lower", 1)]
    ] * 4


def test_a_span_that_cannot_be_cut_may_take_the_tokens_of_answers() -> None:
    target = scheduler(token_budget=8)
    target.add(request("low", 4, max_tokens=9, priority=1))
    step(target)
    target.add(request("high", 20, (image("x", 6, 8),), mask=Mask.IMAGE, priority=0))
    found = [chunks(step(target)) for _ in range(5)]
    assert [("high", 6, 8)] in found


def test_priority_goes_before_arrival() -> None:
    target = scheduler(token_budget=4)
    target.add(request("normal", 4, arrival_s=1))
    target.add(request("urgent", 4, arrival_s=2, priority=-1))
    assert chunks(step(target)) == [("urgent", 0, 4)]


def test_a_tenant_with_all_places_gives_one_to_another() -> None:
    """Its latest request waits behind the other tenant's, and goes on where it was."""
    target = scheduler(max_num_seqs=3, token_budget=100, num_blocks=200)
    for index in range(5):
        target.add(request(f"a{index}", 9, arrival_s=index, max_tokens=12, tenant="a"))
    step(target)
    step(target)
    target.add(request("b0", 9, arrival_s=9, max_tokens=2, tenant="b"))
    assert [name for name, _, _ in chunks(step(target))] == ["a0", "a1", "b0"]
    assert target.num_preemptions == 1
    target.add(request("b1", 9, arrival_s=10, max_tokens=2, tenant="b"))
    served = [[name for name, _, _ in chunks(step(target))] for _ in range(4)]
    assert served[0] == ["a0", "a1", "b0"]
    assert "a2" in served[1] or "b1" in served[1]
    while target.has_requests():
        step(target)
    assert target.num_preemptions <= 2


def test_a_tenant_alone_is_not_interrupted() -> None:
    target = scheduler(max_num_seqs=2, token_budget=100)
    for index in range(6):
        target.add(request(f"a{index}", 4, arrival_s=index, max_tokens=5, tenant="a"))
    while target.has_requests():
        step(target)
    assert target.num_preemptions == 0


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


def test_stop_token_ends_a_request() -> None:
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
    assert target.rows_failed(key("x"), rows(0, 4), had_data=False) == [by_digest]
    retry = step(target, rows_arrive=False)
    assert retry.fetches[0].data is not None
    assert target.rows_failed(key("x"), rows(0, 4), had_data=True) == [with_file]


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
    assert step(target).evicted_rows == ((key("x"), rows(0, 4)),)


def test_rows_that_arrive_after_everybody_left_stay_for_the_next() -> None:
    target = scheduler()
    target.add(request("a", 6, (image("x", 0, 4),)))
    step(target, rows_arrive=False)
    target.abort(request("a", 6).request_id)
    assert target.rows_arrived(key("x"), rows(0, 4), num_encoded_rows=4)
    target.add(request("b", 6, (image("x", 0, 4),)))
    output = step(target)
    assert output.fetches == ()
    assert chunks(output) == [("b", 0, 6)]


def test_a_prefix_hit_costs_no_budget_and_no_fetch() -> None:
    target = scheduler(token_budget=16)
    target.add(request("a", 14, (image("x", 2, 8),), text="same", max_tokens=1))
    step(target), step(target)
    again = request("b", 14, (image("x", 2, 8),), text="same", max_tokens=1, arrival_s=1)
    target.add(again)
    output = step(target)
    assert chunks(output) == [("b", 12, 2)]
    assert output.fetches == ()
    assert again.usage.cached_prompt_tokens == 12
    assert (again.usage.skipped_image_tokens, again.usage.cached_image_tokens) == (8, 0)


def test_a_hit_that_ends_inside_an_image_fetches_only_the_rows_after_it() -> None:
    target = scheduler(token_budget=16, cache_rows=8)
    target.add(request("a", 10, (image("x", 2, 8),), text="same", max_tokens=1))
    step(target), step(target)
    target.add(request("other", 9, (image("y", 0, 8),), max_tokens=1, arrival_s=1))
    assert step(target).evicted_rows == ((key("x"), rows(0, 8)),)
    step(target)
    again = request("b", 11, (image("x", 2, 8),), text="same", max_tokens=1, arrival_s=2)
    target.add(again)
    output = step(target, are_encoded=False)
    assert [(fetch.key, fetch.rows) for fetch in output.fetches] == [(key("x"), rows(6, 8))]
    assert chunks(step(target)) == [("b", 8, 3)]
    assert (again.usage.skipped_image_tokens, again.usage.cached_image_tokens) == (6, 2)


def test_a_fully_cached_prompt_computes_one_token_that_is_not_written() -> None:
    target = scheduler()
    target.add(request("a", 8, text="same", max_tokens=1))
    step(target)
    target.add(request("b", 8, text="same", max_tokens=2, arrival_s=1))
    first, second = step(target), step(target)
    assert chunks(first) == [("b", 7, 1)]
    assert first.chunks[0].write_start == 8
    assert (first.chunks[0].block_start, len(first.chunks[0].block_ids)) == (0, 2)
    assert chunks(second) == [("b", 8, 1)]
    assert second.chunks[0].write_start == 8
    assert (second.chunks[0].block_start, len(second.chunks[0].block_ids)) == (2, 1)


def test_equal_prompts_of_one_step_share_the_blocks_of_the_first() -> None:
    target = scheduler(token_budget=32)
    for name in ("a", "b", "c"):
        target.add(request(name, 10, (image("x", 1, 3),), text="same", arrival_s=ord(name)))
    step(target)
    assert chunks(step(target)) == [("a", 1, 9), ("b", 8, 2), ("c", 8, 2)]


def test_blocks_of_a_failed_step_are_never_found() -> None:
    target = scheduler()
    target.add(request("a", 8, text="same"))
    assert [each.request_id for each in target.fail_step(target.schedule())] == ["a"]
    target.check_integrity()
    target.add(request("b", 8, text="same"))
    assert chunks(step(target)) == [("b", 0, 8)]


def test_a_request_whose_deadline_is_over_is_not_begun() -> None:
    target = scheduler()
    target.add(request("late", 4, arrival_s=0, deadline_s=0.0))
    target.add(request("on time", 4, arrival_s=1, deadline_s=5.0))
    output = step(target)
    assert output.expired == ("late",)
    assert chunks(output) == [("on time", 0, 4)]


def test_a_request_is_not_begun_when_even_the_best_pace_so_far_is_too_slow_for_it() -> None:
    now = 0.0
    target = scheduler(clock=lambda: now)

    def compute(duration_s: float) -> SchedulerOutput:
        nonlocal now
        output = target.schedule()
        now += duration_s
        finish_step(target, output)
        return output

    target.add(request("warm", 8, text="same", max_tokens=1, arrival_s=0))
    compute(4.0)
    target.add(request("first to come", 8, max_tokens=1, arrival_s=1))
    assert compute(8.0).expired == ()
    # Half a second per token at best; now it is 12.
    target.add(request("eight tokens", 8, max_tokens=1, arrival_s=2, deadline_s=15.9))
    target.add(request("one token, the rest is cached", 8, text="same", max_tokens=1, arrival_s=3, deadline_s=12.6))
    target.add(request("eight tokens, enough time", 8, max_tokens=1, arrival_s=4, deadline_s=16.1))
    output = compute(1.0)
    assert output.expired == ("eight tokens",)
    assert chunks(output) == [("one token, the rest is cached", 7, 1), ("eight tokens, enough time", 0, 8)]


def test_a_few_tokens_before_a_missing_row_wait_for_it_and_many_do_not() -> None:
    target = scheduler(token_budget=32, min_tokens_before_missing_row=4)
    target.add(request("few", 12, (image("x", 3, 5),), arrival_s=0))
    target.add(request("many", 12, (image("y", 4, 5),), arrival_s=1))
    target.add(request("text", 3, arrival_s=2))
    first = step(target)
    assert chunks(first) == [("many", 0, 4), ("text", 0, 3)]
    assert {fetch.key for fetch in first.fetches} == {key("x"), key("y")}
    assert set(chunks(step(target))) == {("few", 0, 12), ("many", 4, 8), ("text", 3, 1)}


def test_without_overlap_a_prompt_waits_for_all_rows_that_it_asked_for() -> None:
    target = scheduler(overlap_encode=False)
    target.add(request("a", 12, (image("first", 2, 3), image("second", 6, 3))))
    output = step(target, rows_arrive=False)
    assert chunks(output) == []
    first, second = output.fetches
    target.rows_arrived(first.key, first.rows, first.num_image_rows)
    assert chunks(step(target)) == []
    target.rows_arrived(second.key, second.rows, second.num_image_rows)
    assert chunks(step(target)) == [("a", 0, 12)]


def test_without_overlap_a_prompt_whose_images_do_not_fit_together_goes_on_with_those_that_do() -> None:
    target = scheduler(overlap_encode=False, cache_rows=4)
    target.add(request("a", 12, (image("first", 2, 3), image("second", 6, 3))))
    assert chunks(step(target)) == []
    assert chunks(step(target)) == [("a", 0, 6)]
    assert chunks(step(target)) == []
    assert chunks(step(target)) == [("a", 6, 6)]


def test_the_budget_cuts_shorter_than_that() -> None:
    target = scheduler(token_budget=2, min_tokens_before_missing_row=4)
    target.add(request("a", 12, (image("x", 5, 5),)))
    assert chunks(step(target, rows_arrive=False)) == [("a", 0, 2)]
    assert chunks(step(target, rows_arrive=False)) == []


def test_rows_asked_for_in_one_step_are_bounded_but_one_image_always_goes() -> None:
    target = scheduler(rows_asked=6, cache_rows=64)
    for index, name in enumerate(("big", "mid", "small")):
        target.add(request(name, 9, (image(name, 0, 8 - 2 * index),), arrival_s=index))
    assert [len(fetch.rows) for fetch in step(target).fetches] == [8]
    assert [len(fetch.rows) for fetch in step(target).fetches] == [6]
    assert [len(fetch.rows) for fetch in step(target).fetches] == [4]


def test_deterministic_chunks_do_not_depend_on_budget_or_cache() -> None:
    def chunks_of(token_budget: int, *, warm: bool) -> list[tuple[int, int]]:
        target = scheduler(token_budget=token_budget, deterministic=True)
        if warm:
            target.add(request("warm", 10, text="same", max_tokens=1))
            while target.has_requests():
                step(target)
        target.add(request("a", 10, text="same", max_tokens=3, arrival_s=1))
        found = []
        while target.has_requests():
            found += [(start, num_tokens) for _, start, num_tokens in chunks(step(target))]
        return found

    cold = chunks_of(4, warm=False)
    assert cold == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]
    assert chunks_of(7, warm=False) == cold
    assert chunks_of(16, warm=True) == cold[2:]


class TestTheSeedsCrashCase:
    """vLLM PR #11895: two equal prompts of 16032 tokens, one image, a cache that holds it once."""

    IMAGE = image("x", 7333, 8687)

    def target(self, **changes: Any) -> Scheduler:
        return scheduler(
            token_budget=8192,
            num_blocks=4096,
            cache_rows=8687,
            context=20_000,
            rows_asked=8687,
            block_size=16,
            **changes,
        )

    def two(self) -> tuple[Request, Request]:
        return (
            request("a", 16032, (self.IMAGE,), text="same", max_tokens=3, arrival_s=1),
            request("b", 16032, (self.IMAGE,), text="same", max_tokens=3, arrival_s=2),
        )

    def test_both_end_with_one_fetch(self) -> None:
        target = self.target()
        first, second = self.two()
        # The rows are there before the first step, as in the report.
        target.add(first)
        target.add(second)
        target.encoder_cache.reserve(self.IMAGE.key, rows(0, 8687))
        target.rows_arrived(self.IMAGE.key, rows(0, 8687), num_encoded_rows=8687)
        steps = [step(target) for _ in range(4)]
        assert [[chunk.num_tokens for chunk in each.chunks] for each in steps] == [[8192], [7840, 1], [1, 1], [1, 1]]
        assert all(each.fetches == () for each in steps)
        assert not target.has_requests() or not step(target).chunks

    def test_without_the_rows_the_text_before_the_image_goes_first(self) -> None:
        target = self.target()
        first, second = self.two()
        target.add(first)
        target.add(second)
        steps = [step(target) for _ in range(6)]
        assert [[chunk.num_tokens for chunk in each.chunks] for each in steps] == [
            [7333, 5], [8192], [507, 1], [1, 1], [1, 1], [],
        ]  # fmt: skip
        assert sum(len(each.fetches) for each in steps) == 1
        assert (first.usage.encoded_image_tokens, second.usage.encoded_image_tokens) == (8687, 0)

    def test_an_evicted_image_is_not_fetched_for_a_token_behind_it(self) -> None:
        _, output = self.evicted()
        assert output.fetches == ()
        assert chunks(output) == [("b", 16031, 1)]

    def test_with_whole_blocks_four_rows_are_fetched_and_nothing_is_encoded(self) -> None:
        target, output = self.evicted(deterministic=True)
        assert [fetch.rows for fetch in output.fetches] == [rows(8683, 8687)]
        assert chunks(step(target)) == [("b", 16016, 16)]

    def evicted(self, **changes: bool) -> tuple[Scheduler, SchedulerOutput]:
        """The step that admits the second request after another image took the first one's place."""
        target = self.target(**changes)
        first, second = self.two()
        target.add(first)
        while target.has_requests():
            step(target)
        target.add(request("other", 8700, (image("y", 1, 8687),), max_tokens=1, arrival_s=3))
        evicted: tuple[tuple[ContentKey, RowRange], ...] = ()
        while target.has_requests():
            evicted += step(target).evicted_rows
        assert evicted == ((self.IMAGE.key, rows(0, 8687)),)
        target.add(second)
        return target, step(target)

    def test_while_a_running_request_holds_the_cache_text_behind_runs(self) -> None:
        target = self.target()
        holder = request("holder", 16032, (image("y", 7000, 8687),), max_tokens=3, arrival_s=0)
        target.add(holder)
        step(target)
        assert chunks(step(target)) == [("holder", 7000, 8192)]
        target.add(request("waits", 8700, (image("x", 0, 8687),), arrival_s=1))
        target.add(request("text", 20, arrival_s=2))
        assert chunks(step(target)) == [("holder", 15192, 840), ("text", 0, 20)]
        output = step(target)
        assert [fetch.key for fetch in output.fetches] == [key("x")]
        assert chunks(step(target))[-1] == ("waits", 0, 8190)


def test_rows_are_asked_for_a_waiting_request_when_room_comes_free_while_the_batch_is_full() -> None:
    target = scheduler(cache_rows=8, max_num_seqs=1, token_budget=32)
    target.add(request("runs", 10, (image("x", 0, 8),), arrival_s=1, max_tokens=30))
    target.add(request("waits", 10, (image("y", 0, 8),), arrival_s=2))
    outputs = [step(target) for _ in range(6)]
    asked = [fetch.key for output in outputs for fetch in output.fetches]
    assert asked == [key("x"), key("y")]
    assert target.num_running == 1


def test_a_request_that_adopted_blocks_of_a_failed_step_without_being_in_it_starts_again() -> None:
    target = scheduler(token_budget=8)
    for index, name in enumerate(("a", "b")):
        target.add(request(name, 20, (image("x", 5, 12),), text="same", arrival_s=index))
    assert chunks(step(target)) == [("a", 0, 5), ("b", 4, 1)]
    output = target.schedule()
    assert chunks(output) == [("a", 5, 8)]
    adopter = target.request(RequestId("b"))
    assert adopter.num_computed_tokens == 12
    target.fail_step(output)
    assert (adopter.state, adopter.num_computed_tokens) == (RequestState.WAITING, 0)
    target.check_integrity()
    assert chunks(step(target)) == [("b", 4, 8)]


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_requests_that_arrive_at_the_same_moment_never_wait_for_each_other(first: str, second: str) -> None:
    """The queue and the row cache once ordered equal arrivals differently: neither request could start."""
    bypass = CacheScope(bypass=True)
    target = scheduler(token_budget=6, cache_rows=12, context=100, rows_asked=64)
    preempted = request(first, 24, (image("y", 1, 7), image("z", 12, 6)), priority=1, max_tokens=1, cache_scope=bypass)
    other = request(second, 20, (image("x", 0, 8),), priority=1, max_tokens=1, cache_scope=bypass)
    target.add(request("c", 9, (image("w", 2, 5),), priority=0, cache_scope=bypass))
    held_back = step(target, rows_arrive=False).fetches
    target.add(preempted)
    step(target)
    target.add(other)
    if preempted.state is RequestState.RUNNING:
        target._preempt(preempted)
    else:
        target._waiting.remove(preempted)
        target._waiting.add(preempted)
    step(target)
    for fetch in held_back:
        target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows)
    target.abort(RequestId("c"))
    for _ in range(30):
        step(target)
    assert not target.has_requests()


def test_a_request_preempted_with_its_last_token_in_flight_keeps_the_count_of_its_encode() -> None:
    target = scheduler(token_budget=16, num_blocks=4, cache_rows=8, max_num_seqs=2)
    ahead = request("ahead", 7, max_tokens=8, arrival_s=0)
    last = request("last", 8, (image("x", 0, 4),), max_tokens=1, arrival_s=1)
    target.add(ahead)
    target.add(last)
    step(target)
    output = target.schedule()
    assert [chunk.request_id for chunk in output.chunks] == ["ahead", "last"]
    target.advance(output)
    # The other one needs a block.
    target.schedule()
    assert last.num_preemptions == 1
    target.update(output, [SampledToken(chunk.request_id, 7, None) for chunk in output.chunks])
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.usage.encoded_image_tokens, last.usage.cached_image_tokens) == (4, 0)
