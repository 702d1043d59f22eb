"""Drafts under arbitrary traffic: answers are the model's, nobody waits for a guess, nothing wrong is kept."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.sampling_params import AnswerSoFar, ConstraintFollower
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SampledToken, ScheduledChunk, SchedulerOutput
from decoder_svc.scheduling.speculation import MAX_PAUSE, NO_SPECULATION, Speculation, SpeculationLimits
from decoder_svc.scheduling.window import Window
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import request, scheduler
from tests.decoder_svc.scheduling.traffic import Traffic

LIMITS = SpeculationLimits(4, ngram_min=1, ngram_max=3)
WINDOWS = [None, Window(1), Window(5), Window(6), Window(5, is_chunked=True)]
NUM_SEEDS = 14


@functools.cache
def traffic_of(seed: int, mask: Mask, window: Window | None) -> Traffic:
    """Runs traffic with drafts once; it checks itself meanwhile."""
    traffic = Traffic(seed, mask=mask, window=window, speculation=LIMITS)
    traffic.run(120)
    return traffic


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mask", list(Mask))
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_answers_are_the_models_under_any_traffic(seed: int, mask: Mask, window: Window | None) -> None:
    traffic_of(seed, mask, window)


@pytest.mark.parametrize("mask", list(Mask))
def test_traffic_is_worth_testing_with(mask: Mask) -> None:
    """Drafts that are right, wrong, and both in one chunk; answers that end inside; preemptions and hits."""
    right = wrong = hits = preemptions = ended_inside = 0
    for seed in range(2 * NUM_SEEDS):
        traffic = traffic_of(seed, mask, Window(5))
        speculation = traffic.target.speculation
        right += speculation.num_accepted
        wrong += speculation.num_drafted - speculation.num_accepted
        hits += sum(one.usage.cached_prompt_tokens > 0 for one in traffic.requests)
        preemptions += sum(one.num_preemptions > 0 and one.usage.accepted_draft_tokens > 0 for one in traffic.requests)
        ended_inside += sum(
            one.finish_reason is FinishReason.STOP and one.usage.accepted_draft_tokens > 0 for one in traffic.requests
        )
    assert min(right, wrong, hits, preemptions, ended_inside) >= 4, (right, wrong, hits, preemptions, ended_inside)


def without_drafts(target: Scheduler) -> Scheduler:
    """The same scheduler in the same state, but that it guesses nothing."""
    twin = copy.deepcopy(target)
    twin.speculation = Speculation(NO_SPECULATION, twin.kv_cache, twin.limits.max_context_tokens)
    return twin


def stripped(chunk: ScheduledChunk, plain: ScheduledChunk) -> ScheduledChunk:
    """A chunk without its drafts and their blocks."""
    if not chunk.draft_ids:
        return chunk
    num_blocks = len(plain.block_ids)
    return ScheduledChunk(
        request_id=chunk.request_id,
        start=chunk.start,
        num_tokens=chunk.num_tokens - len(chunk.draft_ids),
        write_start=chunk.write_start,
        block_start=chunk.block_start,
        block_ids=chunk.block_ids[:num_blocks],
        samples=chunk.samples,
        sliding=plain.sliding,
    )


def schedule_both(target: Scheduler) -> SchedulerOutput:
    """The next step, after a look at what it would be without drafts: the same for everybody, no name less."""
    twin = without_drafts(target)
    plain = twin.schedule()
    output = target.schedule()
    assert (output.admitted, output.released, output.evicted_rows, output.fetches, output.expired) == (
        plain.admitted, plain.released, plain.evicted_rows, plain.fetches, plain.expired,
    )  # fmt: skip
    assert len(output.chunks) == len(plain.chunks)
    assert tuple(stripped(*both) for both in zip(output.chunks, plain.chunks, strict=True)) == plain.chunks
    for pool, twin_pool in (
        (target.kv_cache.pool, twin.kv_cache.pool),
        (target.kv_cache.sliding_pool, twin.kv_cache.sliding_pool),
    ):
        if pool is not None and twin_pool is not None:
            assert pool.num_published_blocks == twin_pool.num_published_blocks, "a cached block went for a guess"
    return output


class TwinTraffic(Traffic):
    """Looks at every step in both ways."""

    def step(self) -> None:
        output = schedule_both(self.target)
        self.target.update(output, self.oracle.run(output))
        self.travelling += output.fetches


@pytest.mark.parametrize("window", [None, Window(5), Window(5, is_chunked=True)])
@pytest.mark.parametrize("seed", range(12))
def test_drafts_delay_no_request_and_evict_no_cached_block(seed: int, window: Window | None) -> None:
    TwinTraffic(seed, window=window, speculation=LIMITS).run(100)


def loop(name: str, *, num_tokens: int = 9, max_tokens: int = 50, stop: frozenset[int] = frozenset()) -> Request:
    """A request whose prompt goes round in threes."""
    one = request(name, num_tokens, max_tokens=max_tokens, stop_token_ids=stop)
    one.token_ids[:] = [7 + index % 3 for index in range(num_tokens)]
    one.prompt = type(one.prompt)(tuple(one.token_ids))
    return one


def step_with(target: Scheduler, agreed: int | None) -> ScheduledChunk:
    """One step of the only request: the first `agreed` drafts are right, None: all."""
    output = target.schedule()
    (chunk,) = output.chunks
    one = target.request(chunk.request_id)
    right = chunk.draft_ids[:agreed]
    # In the loop's order, or out of it where a draft is to be wrong.
    last = (right or one.token_ids[-1:])[-1]
    following = 7 + (last - 7 + 1) % 3 if len(right) == len(chunk.draft_ids) else 100
    target.update(output, [SampledToken(chunk.request_id, token_id, None) for token_id in (*right, following)])
    target.check_integrity()
    return chunk


def test_a_loop_takes_few_steps_and_usage_says_so() -> None:
    target = scheduler(speculation=SpeculationLimits(4))
    one = loop("a", max_tokens=22)
    target.add(one)
    chunks = []
    while target.has_requests() and one.finish_reason is None:
        chunks.append(step_with(target, None))
    assert one.output_token_ids == [7 + index % 3 for index in range(22)]
    # The prompt's step samples one, then three, five each as long as there is so much to come, and what is left.
    assert [chunk.num_tokens for chunk in chunks] == [9, 3, 5, 5, 5, 3]
    assert (one.usage.completion_tokens, one.usage.accepted_draft_tokens) == (22, 16)
    assert (target.speculation.num_drafted, target.speculation.num_accepted) == (16, 16)
    assert one.finish_reason is FinishReason.LENGTH


def test_an_answer_ends_at_a_stop_id_and_is_never_guessed_to_end() -> None:
    target = scheduler(speculation=SpeculationLimits(4))
    one = loop("a", stop=frozenset({9}))
    target.add(one)
    chunks = [step_with(target, None), step_with(target, None)]
    assert one.output_token_ids == [7, 8, 9]
    assert chunks[1].draft_ids == (8,)
    assert one.finish_reason is FinishReason.STOP


def test_tokens_behind_the_end_do_not_count() -> None:
    """The runner knows no ends: it samples as far as guesses are right."""
    target = scheduler(speculation=SpeculationLimits(4))
    one = loop("a")
    target.add(one)
    step_with(target, None)
    output = target.schedule()
    assert output.chunks[0].draft_ids == (8, 9)
    # It became known meanwhile that this ends the answer.
    one.params = type(one.params)(max_tokens=50, stop_token_ids=frozenset({8}))
    sampled = [SampledToken(one.request_id, token_id, None) for token_id in (8, 9, 7)]
    updates = target.update(output, sampled)
    assert [(update.token.token_id, update.was_draft) for update in updates] == [(8, True)]
    assert (one.output_token_ids, one.finish_reason) == ([7, 8], FinishReason.STOP)
    assert one.usage.accepted_draft_tokens == target.speculation.num_accepted == 1
    target.check_integrity()


def test_wrong_drafts_are_forgotten_and_their_blocks_given_back() -> None:
    target = scheduler(speculation=SpeculationLimits(6))
    one = loop("a", num_tokens=11)
    target.add(one)
    step_with(target, None)
    step_with(target, 1)
    assert one.num_tokens == 14 == one.num_computed_tokens + 1
    assert len(target.kv_cache.block_table(one.request_id)) == 4
    assert target.kv_cache.pool.num_published_blocks == 3


def test_tokens_of_right_drafts_can_be_found_even_if_the_answer_ended_with_them() -> None:
    target = scheduler(speculation=SpeculationLimits(4))
    target.add(loop("a", max_tokens=8))
    while target.live_requests():
        step_with(target, None)
    # 9 tokens of the prompt and 7 of the answer are computed.
    assert target.kv_cache.pool.num_published_blocks == 4


def test_more_is_guessed_as_long_as_all_of_it_is_right() -> None:
    target = scheduler(speculation=SpeculationLimits(12), context=2000, num_blocks=500)
    target.add(loop("a", num_tokens=12, max_tokens=900))
    step_with(target, None)
    assert [len(step_with(target, None).draft_ids) for _ in range(5)] == [2, 4, 8, 12, 12]


def test_after_wrong_drafts_a_request_sits_out_longer_and_longer_until_one_is_right() -> None:
    target = scheduler(speculation=SpeculationLimits(2), context=2000, num_blocks=500)
    one = loop("a", num_tokens=12, max_tokens=900)
    target.add(one)
    step_with(target, None)

    def steps_without_drafts() -> int:
        count = 0
        while True:
            # Restore the request's last tokens, so that every step has a draft to propose.
            one.token_ids[-3:] = [7, 8, 9]
            if step_with(target, 0).draft_ids:
                return count
            count += 1

    pauses = [steps_without_drafts() for _ in range(9)]
    assert pauses == [0, 1, 2, 4, 8, 16, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    while True:
        one.token_ids[-3:] = [7, 8, 9]
        if step_with(target, 1).draft_ids:
            break
    assert steps_without_drafts() == 0


@pytest.mark.parametrize("token_budget", [3, 4, 5, 6, 7, 20])
def test_drafts_take_the_rest_of_the_budget(token_budget: int) -> None:
    target = scheduler(speculation=SpeculationLimits(4), token_budget=token_budget)
    for name in "abc":
        target.add(loop(name))
    for _ in range(30):
        output = target.schedule()
        sampled = [
            SampledToken(chunk.request_id, token_id, None)
            for chunk in output.chunks
            if chunk.samples
            for token_id in (
                *chunk.draft_ids,
                7 + (target.request(chunk.request_id).num_tokens + len(chunk.draft_ids)) % 3,
            )
        ]
        if len([chunk for chunk in output.chunks if chunk.start >= 9]) == 3:
            assert output.num_scheduled_tokens == min(token_budget, 9)
            return
        target.update(output, sampled)
    raise AssertionError("the three never decode together")


def test_no_draft_goes_beyond_the_context() -> None:
    target = scheduler(speculation=SpeculationLimits(4), context=13)
    one = loop("a")
    target.add(one)
    lengths = []
    while one.finish_reason is None:
        lengths.append(step_with(target, None).num_tokens)
    assert one.num_tokens == 13
    assert lengths == [9, 3]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000), limits=st.builds(SpeculationLimits, st.integers(1, 9), st.just(1), st.integers(1, 4))
)
def test_any_limits(seed: int, limits: SpeculationLimits) -> None:
    Traffic(seed, speculation=limits).run(60)


class Forced:
    """A grammar that leaves no choice about the next tokens, and its follower."""

    error = None

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = list(token_ids)
        self.num_begun = 0

    @property
    def follower(self) -> ConstraintFollower:
        return self

    def begin(self, answers: Sequence[AnswerSoFar], num_tokens: int) -> None:
        for answer in answers:
            assert isinstance(answer.constraint, Forced)
            answer.constraint.num_begun += 1

    def forced(self, answers: Sequence[AnswerSoFar], num_tokens: int) -> list[list[int]]:
        found = []
        for answer in answers:
            assert isinstance(answer.constraint, Forced)
            found.append(answer.constraint._token_ids[:num_tokens])
        return found

    def begin_masks(self, answers: Sequence[AnswerSoFar]) -> Callable[[], list[list[bytes] | None]]:
        raise AssertionError("the scheduler does not ask for masks")

    def check(self, answers: Sequence[AnswerSoFar], guesses: Sequence[Sequence[int]]) -> list[int | bytes]:
        raise AssertionError("the scheduler does not ask about guesses")


def decoding(target: Scheduler, one: Request) -> None:
    """Brings a request to the point where its next token is decoded."""
    target.add(one)
    output = target.schedule()
    target.update(output, [SampledToken(chunk.request_id, 50, None) for chunk in output.chunks if chunk.samples])


def forcing(num_tokens: int, ngrams: int = 0) -> Scheduler:
    return scheduler(speculation=SpeculationLimits(ngrams, ngram_min=1, max_forced_tokens=num_tokens))


def test_tokens_that_a_grammar_forces_are_drafts_with_and_without_prompt_lookup() -> None:
    for ngrams in (0, 4):
        target = forcing(8, ngrams)
        one = loop("a")
        one.constraint = Forced(60, 61, 62)
        decoding(target, one)
        (chunk,) = target.schedule().chunks
        assert chunk.draft_ids == (60, 61, 62)
        assert chunk.num_tokens == 4


def test_forced_tokens_of_all_requests_share_a_bound_and_stop_before_the_answers_last_token() -> None:
    target = forcing(5)
    several = [loop(name) for name in ("a", "b", "c")]
    for one in several:
        decoding(target, one)
    for one in several:
        one.constraint = Forced(60, 61, 62)
    assert [len(chunk.draft_ids) for chunk in target.schedule().chunks] == [3, 2, 0]
    target = forcing(8)
    short = loop("a", max_tokens=3)
    short.constraint = Forced(60, 61, 62)
    decoding(target, short)
    # One token is there, and the last one is sampled behind the draft.
    assert [len(chunk.draft_ids) for chunk in target.schedule().chunks] == [1]


def test_a_grammar_without_a_force_leaves_prompt_lookup_to_guess_and_its_failures_to_itself() -> None:
    target = forcing(8, ngrams=4)
    one = loop("a")
    one.constraint = Forced()
    target.add(one)
    output = target.schedule()
    target.update(output, [SampledToken(one.request_id, one.token_ids[0], None)])
    (chunk,) = target.schedule().chunks
    assert chunk.draft_ids
    assert chunk.draft_ids[0] == one.token_ids[1]


def test_wrong_forced_tokens_do_not_pause_the_drafter() -> None:
    target = forcing(8, ngrams=4)
    one = loop("a")
    one.constraint = forced = Forced(60, 61)
    decoding(target, one)
    output = target.schedule()
    target.update(output, [SampledToken(one.request_id, 7, None)])
    forced._token_ids.clear()
    (chunk,) = target.schedule().chunks
    assert chunk.draft_ids, "the drafter was blamed"


def test_a_step_with_a_constrained_request_keeps_the_next_one_waiting() -> None:
    target = forcing(8)
    plain, bound = loop("a"), loop("b")
    bound.constraint = Forced()
    target.add(plain)
    output = target.schedule()
    assert target.may_run_ahead(output)
    target.update(output, [SampledToken(plain.request_id, 50, None)])
    target.add(bound)
    assert not target.may_run_ahead(target.schedule())
