"""Structured output in the service: the same answers as `generate` under the same masks, however they are computed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import jsonschema
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from decoder_svc import assembly
from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.constraint.constraint_process import ConstraintProcess
from decoder_svc.constraint.followed_answer import FollowedAnswer
from decoder_svc.constraint.frames import Step
from decoder_svc.constraint.grammars import Grammars
from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint, ConstraintKind
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.constraint.demo_constraints import DEMO_VOCAB, WholeAnswer, demo_grammars
from tests.decoder_svc.constraint.test_answer_matcher import allowed
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder

# Tests share decoders, so they share an event loop, too.
pytestmark = pytest.mark.asyncio(loop_scope="module")

END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue", "green"]},
        "places": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 8}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["colour", "places", "note"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, Any] = {
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": "(red|blue) [0-9]{1,3}(, [a-z]{2,4}){2}"},
    "grammar": {"grammar": 'start: item (", " item){3}\nitem: "a" | "bc" item'},
    "choice": {"choice": pb.ChoiceConstraint(texts=["yes, there is", "no, there is none"])},
}
QUESTIONS = ["What is in the picture?", "Where is it?", "How many shapes are there?"]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.2, "seed": 3},
    {"temperature": 0.8, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.4},
]
# Settings under which an answer is computed in other ways: many chunks, few blocks, drafts, one chunk at a time.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "drafts": {"speculative_tokens": 4, "speculative_ngram_min": 1},
    "deterministic": {"deterministic": True},
    "few blocks": {"num_kv_blocks": 9, "max_context_tokens": 140},
    "guesses": {"speculative_tokens": 0},
}
GREEDY: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": dict.fromkeys(range(40, 120), -100.0)},
    {"logprobs": 3},
    {"n": 3},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def decoder(request: pytest.FixtureRequest) -> AsyncIterator[RunningDecoder]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "guesses":
            patch.setattr(assembly, "_GUESSES_ABOVE_S", -1.0)
        async with running_decoder(DEMO_MODEL, dtype="float32", **WAYS[request.param]) as decoder:
            yield decoder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain() -> AsyncIterator[RunningDecoder]:
    async with running_decoder(DEMO_MODEL, dtype="float32") as decoder:
        yield decoder


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


@pytest.fixture(scope="module")
def expected(grammars: Grammars) -> dict[tuple[str, str], list[int]]:
    """Greedy answers of transformers' `generate`, with masks of states that see each prefix for the first time."""
    model = AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    answers = {}
    for name, constraint in (("json_schema", json.dumps(SCHEMA)), ("regex", CONSTRAINTS["regex"]["regex"])):
        wanted = Constraint(ConstraintKind(name), constraint)
        for question in QUESTIONS:
            message = {"role": "user", "content": [{"type": "text", "text": question}]}
            prompt: Any = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)

            def may_follow(
                _: int, ids: torch.Tensor, length: int = len(prompt), wanted: Constraint = wanted
            ) -> list[int]:
                state = WholeAnswer(grammars, wanted, num_prompt_tokens=length)
                return allowed(state.masks(ids.tolist(), [])[0])

            with torch.inference_mode():
                found = model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=60,
                    prefix_allowed_tokens_fn=may_follow,
                    pad_token_id=0,
                )
            answers[name, question] = found[0, len(prompt) :].tolist()
    return answers


async def generate(decoder: RunningDecoder, question: str, **sampling: Any) -> pb.GenerateResponse:
    request = params(question, **{"temperature": 0.0, "max_tokens": 60, **sampling})
    return await decoder.stub.Generate(pb.GenerateRequest(params=request), timeout=120)


async def test_greedy_answers_are_those_of_generate(
    decoder: RunningDecoder, expected: dict[tuple[str, str], list[int]]
) -> None:
    # All at once: with few blocks, some are preempted.
    asked = list(expected)
    answers = await asyncio.gather(*(generate(decoder, question, **CONSTRAINTS[name]) for name, question in asked))
    for key, answer in zip(asked, answers, strict=True):
        assert list(answer.choices[0].token_ids) == expected[key], key


async def test_sampled_answers_do_not_depend_on_how_they_are_computed(
    plain: RunningDecoder, decoder: RunningDecoder
) -> None:
    for name, constraint in CONSTRAINTS.items():
        for sampling in SAMPLING:
            one, other = [await generate(each, QUESTIONS[0], **constraint, **sampling) for each in (plain, decoder)]
            assert one.choices[0].text == other.choices[0].text, (name, sampling)
            assert one.choices[0].finish_reason == pb.FINISH_REASON_STOP, (name, sampling)


async def test_guesses_change_no_answer(plain: RunningDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are asked about their likeliest tokens are those under masks, whatever changes the logits."""
    taken: Counter[int] = Counter()
    original = AnswerFollower.check

    def check(self: AnswerFollower, answers: Any, guesses: Any) -> list[int | bytes]:
        found = original(self, answers, guesses)
        taken.update(-1 if isinstance(one, bytes) else one for one in found)
        return found

    monkeypatch.setattr(AnswerFollower, "check", check)
    monkeypatch.setattr(assembly, "_GUESSES_ABOVE_S", -1.0)
    asked = [(constraint, sampling) for constraint in CONSTRAINTS.values() for sampling in GREEDY]
    found = []
    async with running_decoder(DEMO_MODEL, dtype="float32") as guessing:
        for decoder in (plain, guessing):
            answers = [generate(decoder, QUESTIONS[0], **constraint, **sampling) for constraint, sampling in asked]
            found.append([list(answer.choices) for answer in await asyncio.gather(*answers)])
    assert found[0] == found[1]
    # The likeliest token came next, another one of the reported ones did, and none of them.
    assert taken[0] > 20
    assert taken[-1] > 5
    assert sum(taken[index] for index in range(1, 8)) > 5


async def test_steps_are_saved_where_the_schema_leaves_no_choice(plain: RunningDecoder) -> None:
    answer = await generate(plain, QUESTIONS[0], json_schema=json.dumps(SCHEMA), logprobs=1)
    jsonschema.validate(json.loads(answer.choices[0].text), SCHEMA)
    assert answer.usage.accepted_draft_tokens > answer.usage.completion_tokens / 3
    assert len(answer.choices[0].logprobs) == answer.usage.completion_tokens


async def test_a_bias_cannot_leave_the_constraint(plain: RunningDecoder) -> None:
    """A bias against every token that may come next changes nothing."""
    digits = dict.fromkeys(range(DEMO_VOCAB), -100.0)
    answer = await generate(plain, QUESTIONS[0], regex="[0-9]{4}", logit_bias=digits)
    assert answer.choices[0].text.isdecimal()
    assert len(answer.choices[0].text) == 4


async def test_what_max_tokens_cuts_is_the_beginning_of_an_answer(plain: RunningDecoder) -> None:
    whole = await generate(plain, QUESTIONS[0], **CONSTRAINTS["json_schema"])
    cut = await generate(plain, QUESTIONS[0], **CONSTRAINTS["json_schema"], max_tokens=12)
    assert cut.choices[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert whole.choices[0].text.startswith(cut.choices[0].text)
    assert cut.usage.completion_tokens == 12


async def test_bad_constraints_and_plain_requests_do_not_disturb_each_other(plain: RunningDecoder) -> None:
    alone = await generate(plain, QUESTIONS[1], max_tokens=10)

    async def refused(**sampling: Any) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(plain, QUESTIONS[0], **sampling)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return str(caught.value.details())

    beside, *reasons = await asyncio.gather(
        generate(plain, QUESTIONS[1], max_tokens=10),
        refused(json_schema='{"not": {}}'),
        refused(grammar='start: "a" nothing'),
        refused(regex="("),
    )
    assert beside.choices[0] == alone.choices[0]
    assert "sampling.json_schema" in reasons[0]
    assert 'Unimplemented keys: ["not"]' in reasons[0]
    assert 'unknown name: "nothing"' in reasons[1]


async def test_a_constraint_that_becomes_too_complex_ends_its_own_request(
    plain: RunningDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FollowedAnswer.step

    def failing(self: FollowedAnswer, process: ConstraintProcess, answer: AnswerSoFar) -> Step:
        step = original(self, process, answer)
        if len(answer.token_ids) > self._num_prompt_tokens + 20:
            # The expression does not take the end of an answer here.
            step.token_ids = [END]
        return step

    monkeypatch.setattr(FollowedAnswer, "step", failing)
    bad = generate(plain, QUESTIONS[0], regex="[a-z]{80}", max_tokens=100)
    good = generate(plain, QUESTIONS[1], max_tokens=30)
    refused, answered = await asyncio.gather(bad, good, return_exceptions=True)
    assert isinstance(refused, grpc.aio.AioRpcError)
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.regex: the answer cannot go on: the constraint became too complex" in str(refused.details())
    assert isinstance(answered, pb.GenerateResponse)
    assert answered.choices[0].finish_reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
