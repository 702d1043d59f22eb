"""Families with recurrent layers: answers equal `generate` wherever a sequence continues a snapshot of its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import CacheScope, Request, RequestId
from decoder_svc.scheduling.request_output import TokenLogprobs
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.speculation import SpeculationLimits
from tests.parity import families, offline
from tests.parity.test_family_conformance import RECURRENT

BLOCK_SIZE = families.BLOCK_SIZE
# Log probabilities in float32 differ by less, whatever the batch and the chunks.
TOLERANCE = 2e-4


@pytest.fixture(params=sorted(RECURRENT))
def family(request: pytest.FixtureRequest, tiny_family: Callable[[str], families.Conformance]) -> families.Conformance:
    return tiny_family(request.param)


@pytest.fixture
def long_question(family: families.Conformance) -> offline.Question:
    assert family.long_question is not None
    return family.long_question


@pytest.fixture
def prompts(family: families.Conformance) -> list[Prompt]:
    return [question.prompt for question in family.offline.questions]


@pytest.fixture
def expected(family: families.Conformance) -> list[list[int]]:
    return [question.expected for question in family.offline.questions]


def continued(question: offline.Question, num_tokens: int) -> Prompt:
    """Returns a question's prompt with the first tokens of its answer."""
    return replace(question.prompt, token_ids=(*question.prompt.token_ids, *question.expected[:num_tokens]))


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("num_known", [1, 17, 31, 40, 63])
def test_a_prompt_with_an_answer_continues_a_snapshot_of_the_answer(
    family: families.Conformance, long_question: offline.Question, interval: int, num_known: int
) -> None:
    """The first request takes the snapshots while it decodes token by token."""
    session = offline.Session(family.offline, snapshot_interval=interval)
    num_tokens = len(long_question.expected)
    assert session.ask([long_question.prompt], max_tokens=num_tokens).token_ids == [long_question.expected]
    longer = continued(long_question, num_known)
    again = session.ask([longer], max_tokens=num_tokens - num_known)
    assert again.token_ids == [long_question.expected[num_known:]]
    num_cached = again.requests[0].usage.cached_prompt_tokens
    at_interval = (len(longer.token_ids) - 1) // (interval * BLOCK_SIZE) * interval * BLOCK_SIZE
    of_prompt = (len(long_question.prompt.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_cached == max(at_interval, of_prompt)


@pytest.mark.parametrize("budget", [9, 23, 64, 2048])
@pytest.mark.parametrize("interval", [1, 3])
def test_warm_answers_equal_with_any_chunks_and_intervals(
    family: families.Conformance, prompts: list[Prompt], expected: list[list[int]], budget: int, interval: int
) -> None:
    session = offline.Session(family.offline, max_num_batched_tokens=budget, snapshot_interval=interval)
    assert session.ask(prompts).token_ids == expected
    again = session.ask(prompts)
    assert again.token_ids == expected
    for request in again.requests:
        num_left = request.num_prompt_tokens - request.usage.cached_prompt_tokens
        # The last block of each prompt has a snapshot before it.
        assert num_left <= BLOCK_SIZE


@pytest.mark.parametrize("num_snapshots", [1, 2, 7])
def test_a_pool_of_few_snapshots_evicts_and_answers_the_same(
    family: families.Conformance, prompts: list[Prompt], expected: list[list[int]], num_snapshots: int
) -> None:
    session = offline.Session(
        family.offline,
        num_blocks=families.few_blocks(prompts),
        max_num_batched_tokens=23,
        max_num_seqs=3,
        num_snapshots=num_snapshots,
    )
    for order in (prompts, prompts[::-1]):
        answers = expected if order is prompts else expected[::-1]
        assert session.ask(order).token_ids == answers


def test_several_requests_with_one_prompt_get_one_answer(
    family: families.Conformance, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    session = offline.Session(family.offline, max_num_batched_tokens=30)
    asked = [prompt for prompt in prompts[:3] for _ in range(3)]
    assert session.ask(asked).token_ids == [answer for answer in expected[:3] for _ in range(3)]
    num_computed = sum(step.num_scheduled_tokens for step in session.steps)
    num_decoded = sum(len(answer) - 1 for answer in expected[:3]) * 3
    num_in_prompts = sum(len(prompt.token_ids) for prompt in prompts[:3])
    # All but the first compute no more than the block that has the last token.
    assert num_computed <= num_in_prompts + 6 * BLOCK_SIZE + num_decoded


@pytest.mark.parametrize("num_draft_states", [0, 1, 3, 20])
def test_rejected_drafts_do_not_stay_in_a_state(
    family: families.Conformance, prompts: list[Prompt], num_draft_states: int
) -> None:
    # With so few allowed words, answers repeat themselves, and also deviate often.
    params = SamplingParams(logit_bias=((520, 50.0), (530, 50.0), (540, 50.0)), max_tokens=40)
    expected = offline.Session(family.offline).ask(prompts, params=params).token_ids
    session = offline.Session(
        family.offline,
        speculation=SpeculationLimits(5, ngram_min=1, ngram_max=3),
        max_num_seqs=4,
        num_snapshots=9,
        num_draft_states=num_draft_states,
    )
    for order in (1, -1):
        assert session.ask(prompts[::order], params=params).token_ids == expected[::order]
    speculation = session.scheduler.speculation
    assert (0 < speculation.num_accepted < speculation.num_drafted) == (num_draft_states > 0)


def test_log_probabilities_depend_on_the_batch_by_rounding_only(
    family: families.Conformance, prompts: list[Prompt]
) -> None:
    together = offline.Session(family.offline).ask(prompts, logprobs=3)
    cut = offline.Session(family.offline, max_num_batched_tokens=11, max_num_seqs=4).ask(prompts, logprobs=3)
    for index, prompt in enumerate(prompts):
        alone = offline.Session(family.offline).ask([prompt], logprobs=3)
        for other in (together, cut):
            assert other.token_ids[index] == alone.token_ids[0]
            assert _difference(other.logprobs[index], alone.logprobs[0]) < TOLERANCE


def test_deterministic_answers_are_bit_equal_cold_and_warm_in_any_batch(
    family: families.Conformance, prompts: list[Prompt]
) -> None:
    session = offline.Session(family.offline, deterministic=True, max_num_seqs=4)
    cold = session.ask(prompts, logprobs=3)
    warm = session.ask(prompts, logprobs=3)
    assert any(request.usage.cached_prompt_tokens for request in warm.requests)
    alone = [offline.Session(family.offline, deterministic=True).ask([prompt], logprobs=3) for prompt in prompts]
    family.offline.runner.config = replace(family.offline.runner.config, deterministic=False)
    for index, one in enumerate(alone):
        for other in (cold, warm):
            assert other.token_ids[index] == one.token_ids[0]
            assert _difference(other.logprobs[index], one.logprobs[0]) == 0


def test_requests_without_sharing_begin_with_zeros(
    family: families.Conformance, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    session = offline.Session(family.offline, max_num_seqs=2)
    session.ask(prompts)
    params = SamplingParams(max_tokens=len(expected[0]), min_tokens=len(expected[0]))
    request = Request(RequestId("x"), prompts[0], params, arrival_s=99.0, cache_scope=CacheScope(bypass=True))
    session.scheduler.add(request)
    while session.scheduler.has_requests():
        step = session.scheduler.schedule()
        assert all(not chunk.states.taken for chunk in step.chunks if chunk.states is not None)
        session.scheduler.update(step, family.offline.runner.execute_model(step))
    assert request.output_token_ids == expected[0]


def _difference(found: Sequence[TokenLogprobs | None], wanted: Sequence[TokenLogprobs | None]) -> float:
    """Returns the largest difference between log probabilities of the same tokens."""
    differences = [0.0]
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        values = dict(other.top)
        differences += [abs(value - values[token]) for token, value in one.top if token in values]
    return max(differences)
