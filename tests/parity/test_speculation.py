"""Prompt lookup changes no answer, greedy or sampled: greedy ones are the tokens of `generate`."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decoder_svc.runner.input_batch import IntArray, RequestRow
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits
from tests.decoder_svc.scheduling.mutation import Mutations, Patch
from tests.parity import families, offline
from tests.tiny_families import FAMILIES

# Questions with no, one and three images in turn.
NUM_PROMPTS = 6
# Plain; M-RoPE; windows with images that see themselves; windows with prompts that see themselves; recurrent layers;
# latent attention.
NAMES = tuple(
    name
    for name in (
        "llava_clip",
        "qwen2_vl",
        "gemma3",
        "gemma4",
        "paligemma2",
        "qwen3_5",
        "lfm2_vl",
        "mistral4",
        "kimi_k25",
    )
    if name in FAMILIES
)
LIMITS = SpeculationLimits(5, ngram_min=1, ngram_max=3)
NUM_TOKENS = 48
# Tiny models with random weights seldom repeat themselves. With so few allowed words they do, and also deviate often.
# The words are none of the special tokens, whose logits are all 0.
FEW_WORDS = ((520, 50.0), (530, 50.0), (540, 50.0))
# A token that is none of them.
NO_WORD = 510
# One set of parameters per sampling feature. A row that saw a forbidden token would sample another token.
SAMPLINGS = {
    "free": SamplingParams(),
    "greedy": SamplingParams(logit_bias=FEW_WORDS),
    "seeded": SamplingParams(logit_bias=FEW_WORDS, temperature=0.7, top_p=0.9, seed=11),
    "cold": SamplingParams(logit_bias=FEW_WORDS, temperature=0.3, top_k=2, min_p=0.05, seed=5),
    "repetition": SamplingParams(logit_bias=FEW_WORDS, repetition_penalty=1.05),
    "frequency": SamplingParams(logit_bias=FEW_WORDS, presence_penalty=0.3, frequency_penalty=0.1),
    "put off": SamplingParams(logit_bias=FEW_WORDS, min_tokens=30, stop_token_ids=frozenset({520})),
}
# Sampling sees logits alone, so one family gets all parameters.
SAMPLED = [(NAMES[0], name) for name in SAMPLINGS] + [
    (family, name) for family in NAMES[1:] for name in ("free", "seeded")
]


@pytest.fixture(scope="module")
def built(family_folder: Callable[[str], pathlib.Path]) -> Callable[[str], families.Conformance]:
    return functools.cache(lambda name: families.build(FAMILIES[name], family_folder(name), num_prompts=15))


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, built: Callable[[str], families.Conformance]) -> families.Conformance:
    return built(request.param)


@pytest.fixture
def model(family: families.Conformance) -> offline.OfflineModel:
    return family.offline


@pytest.fixture
def prompts(model: offline.OfflineModel) -> list[Prompt]:
    return [question.prompt for question in model.questions[:NUM_PROMPTS]]


@pytest.fixture(scope="module")
def plain_answers(family: families.Conformance) -> Callable[[SamplingParams], offline.Answers]:
    """Answers to the prompts without speculation, computed once for each set of parameters."""
    prompts = [question.prompt for question in family.offline.questions[:NUM_PROMPTS]]
    return functools.cache(lambda params: offline.Session(family.offline).ask(prompts, params=params))


def num_accepted(answers: offline.Answers) -> int:
    return sum(request.usage.accepted_draft_tokens for request in answers.requests)


def assert_same(answers: offline.Answers, plain: offline.Answers) -> None:
    """Asserts equal tokens, finish reasons and log probabilities."""
    assert answers.token_ids == plain.token_ids
    assert [one.finish_reason for one in answers.requests] == [one.finish_reason for one in plain.requests]
    for found, expected in zip(answers.logprobs, plain.logprobs, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
                assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-3)


def test_tokens_are_those_of_generate(family: families.Conformance, model: offline.OfflineModel) -> None:
    questions = [*model.questions, *([family.long_question] if family.long_question else [])]
    session = offline.Session(model, speculation=LIMITS)
    for num_tokens in {len(question.expected) for question in questions}:
        asked = [question for question in questions if len(question.expected) == num_tokens]
        answers = session.ask([question.prompt for question in asked], max_tokens=num_tokens)
        assert answers.token_ids == [question.expected for question in asked]
    assert session.scheduler.speculation.num_drafted > 0


@pytest.mark.parametrize(("family", "name"), SAMPLED, indirect=["family"])
def test_sampled_answers_are_the_same(
    model: offline.OfflineModel,
    prompts: list[Prompt],
    plain_answers: Callable[[SamplingParams], offline.Answers],
    name: str,
) -> None:
    params = replace(SAMPLINGS[name], max_tokens=NUM_TOKENS, logprobs=2)
    plain = plain_answers(params)
    session = offline.Session(model, speculation=LIMITS)
    assert_same(session.ask(prompts, params=params), plain)
    speculation = session.scheduler.speculation
    assert speculation.num_drafted > speculation.num_accepted
    assert name == "free" or speculation.num_accepted > 20


def test_a_repeating_answer_takes_fewer_steps(model: offline.OfflineModel, prompts: list[Prompt]) -> None:
    plain, session = offline.Session(model), offline.Session(model, speculation=LIMITS)
    params = replace(SAMPLINGS["greedy"], max_tokens=60)
    expected = plain.ask(prompts[:1], params=params)
    answers = session.ask(prompts[:1], params=params)
    assert answers.token_ids == expected.token_ids
    # Every step gives one token and the accepted drafts.
    assert len(plain.steps) - len(session.steps) == num_accepted(answers) > 0


@pytest.mark.parametrize("session", ["chunked", "preempted", "late rows"])
def test_chunks_preemptions_and_late_rows_do_not_change_answers(
    model: offline.OfflineModel,
    prompts: list[Prompt],
    plain_answers: Callable[[SamplingParams], offline.Answers],
    session: str,
) -> None:
    longest_span = max([16, *(span.length for prompt in prompts for span in prompt.mutual_spans)])
    longest = max(len(prompt.token_ids) for prompt in prompts) + NUM_TOKENS
    rows = max(sum(item.num_rows for item in prompt.images) for prompt in prompts)
    few_blocks = -(-longest // model.runner.config.block_size) + 6
    kinds: dict[str, dict[str, Any]] = {
        "chunked": {"max_num_batched_tokens": longest_span + 5},
        "preempted": {"max_num_batched_tokens": max(64, longest_span + 32), "num_blocks": few_blocks},
        "late rows": {"cache_rows": rows, "rows_arrive_after": 3},
    }
    params = replace(SAMPLINGS["greedy"], max_tokens=NUM_TOKENS, logprobs=2)
    expected = plain_answers(params)
    target = offline.Session(model, speculation=LIMITS, **kinds[session])
    answers = target.ask(prompts, params=params)
    assert_same(answers, expected)
    assert num_accepted(answers) > 0
    assert target.scheduler.kv_cache.usage == 0
    if session == "preempted":
        assert sum(one.num_preemptions for one in answers.requests) > 0


def test_accepted_drafts_are_cached_and_rejected_ones_are_not(
    model: offline.OfflineModel, prompts: list[Prompt]
) -> None:
    """The next turn of a chat: one prompt continues the answer, another one ends it differently."""
    params = replace(SAMPLINGS["greedy"], max_tokens=NUM_TOKENS)
    session = offline.Session(model, speculation=LIMITS)
    answers = session.ask(prompts, params=params)
    following = [
        turn
        for prompt, answer in zip(prompts, answers.token_ids, strict=True)
        for turn in (continued(prompt, answer), continued(prompt, [*answer[:-9], 7, 5]))
    ]
    again = session.ask(following, params=params)
    # Sessions share the runner, so a new session ends the earlier ones.
    expected = offline.Session(model).ask(following, params=params)
    assert again.token_ids == expected.token_ids
    if not prompts[0].mutual_spans or prompts[0].mutual_spans[0].length < len(prompts[0].token_ids):
        # A longer prompt shares no prefix in families whose whole prompts see themselves.
        size = model.runner.config.block_size
        for request, prompt, answer in zip(again.requests[::2], prompts, answers.token_ids, strict=True):
            assert request.usage.cached_prompt_tokens == (len(prompt.token_ids) + len(answer) - 1) // size * size


def continued(prompt: Prompt, answer: Sequence[int]) -> Prompt:
    """Returns a prompt followed by its answer; rotary positions continue one by one."""
    positions = prompt.positions
    if positions is not None:
        stop = len(prompt.token_ids) + len(answer)
        following = tuple(range(len(prompt.token_ids) + positions.delta, stop + positions.delta))
        positions = replace(positions, axes=tuple(axis + following for axis in positions.axes))
    return replace(prompt, token_ids=(*prompt.token_ids, *answer), positions=positions)


def test_answers_end_at_the_same_token(model: offline.OfflineModel, prompts: list[Prompt]) -> None:
    """Answers end at a stop id, which min_tokens may delay, or at max_tokens."""
    endings = [
        replace(
            SAMPLINGS["greedy"],
            max_tokens=NUM_TOKENS - 3,
            min_tokens=min_tokens,
            stop_token_ids=frozenset({stop_id}),
            logprobs=0,
        )
        for stop_id in (FEW_WORDS[0][0], FEW_WORDS[1][0], NO_WORD)
        for min_tokens in (0, NUM_TOKENS // 3)
    ]
    plain = offline.Session(model)
    expected = [plain.ask(prompts, params=params) for params in endings]
    session = offline.Session(model, speculation=LIMITS)
    for params, answers in zip(endings, expected, strict=True):
        assert_same(session.ask(prompts, params=params), answers)
    ends = {(one.finish_reason, one.num_output_tokens > 12) for answers in expected for one in answers.requests}
    assert {(FinishReason.STOP, False), (FinishReason.STOP, True), (FinishReason.LENGTH, True)} <= ends


mutation = Mutations()


@mutation
def the_runner_accepts_one_too_many(patch: Patch) -> None:
    original = RequestRow.accept

    def accept(self: RequestRow, sampled: Sequence[int]) -> int:
        draft_ids = self.draft_ids
        num_taken = original(self, sampled)
        if num_taken <= len(draft_ids):
            self._token_ids[self.num_tokens - 1] = draft_ids[num_taken - 1]
        return num_taken

    patch.setattr(RequestRow, "accept", accept)


@mutation
def a_row_is_sampled_without_the_guesses_before_it(patch: Patch) -> None:
    patch.setattr(RequestRow, "contexts", lambda self: [self.token_ids] * (len(self.draft_ids) + 1))


@mutation
def a_guess_has_the_position_of_the_token_before_it(patch: Patch) -> None:
    original = RequestRow.positions

    def positions(self: RequestRow, start: int, stop: int, num_axes: int) -> IntArray:
        found = original(self, start, stop, num_axes).copy()
        if self.draft_ids:
            found[:, 1:] -= 1
        return found

    patch.setattr(RequestRow, "positions", positions)


@mutation
def guesses_are_other_tokens_than_those_computed(patch: Patch) -> None:
    original = RequestRow.ids_between

    def ids_between(self: RequestRow, start: int, stop: int) -> IntArray:
        found = original(self, start, stop)
        return (
            found if not self.draft_ids else original(self, stop - len(found), stop - len(found) + 1).repeat(len(found))
        )

    patch.setattr(RequestRow, "ids_between", ids_between)


@pytest.fixture(scope="module")
def small_model(built: Callable[[str], families.Conformance]) -> offline.OfflineModel:
    return built("llava_clip").offline


def answers_of(model: offline.OfflineModel, speculation: SpeculationLimits) -> Iterator[list[list[int]]]:
    """Yields the answers to the prompts with each of several sets of parameters."""
    prompts = [question.prompt for question in model.questions[:NUM_PROMPTS]]
    for name in ("greedy", "seeded", "frequency"):
        params = replace(SAMPLINGS[name], max_tokens=NUM_TOKENS)
        yield offline.Session(model, speculation=speculation).ask(prompts, params=params).token_ids


@pytest.fixture(scope="module")
def right_answers(small_model: offline.OfflineModel) -> list[list[list[int]]]:
    return list(answers_of(small_model, NO_SPECULATION))


@pytest.mark.parametrize("name", sorted(mutation))
def test_a_fault_in_speculation_changes_answers(
    small_model: offline.OfflineModel, right_answers: list[list[list[int]]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation[name](monkeypatch)
    # Any different answer suffices, so the others are not computed.
    found = answers_of(small_model, LIMITS)
    assert any(answers != right for answers, right in zip(found, right_answers, strict=True))
