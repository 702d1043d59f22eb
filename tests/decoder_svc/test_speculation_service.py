"""Prompt lookup in the service gives the same answers with fewer steps; usage and metrics count them."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder

# Tests share decoders, so they share an event loop, too.
pytestmark = pytest.mark.asyncio(loop_scope="module")

# With so few words in the vocabulary, tiny models repeat themselves.
FEW_WORDS = {20: 50.0, 30: 50.0, 40: 50.0}


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return model_folder("llava_clip")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(folder: pathlib.Path) -> AsyncIterator[RunningDecoder]:
    async with running_decoder(folder) as decoder:
        yield decoder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guessing(folder: pathlib.Path) -> AsyncIterator[RunningDecoder]:
    async with running_decoder(folder, speculative_tokens=5, speculative_ngram_min=1) as decoder:
        yield decoder


async def generate(decoder: RunningDecoder, text: str, **sampling: Any) -> pb.GenerateResponse:
    request = params(text, logit_bias=FEW_WORDS, ignore_eos=True, **sampling)
    return await decoder.stub.Generate(pb.GenerateRequest(params=request), timeout=60)


def value(decoder: RunningDecoder, name: str) -> float:
    found = decoder.registry.get_sample_value(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "seed": 4}, {"frequency_penalty": 0.1}, {"logprobs": 2}], ids=str
)
async def test_answers_are_the_same_and_usage_counts_accepted_drafts(
    plain: RunningDecoder, guessing: RunningDecoder, sampling: dict[str, Any]
) -> None:
    drafts, accepted = "lookonce_decoder_draft_tokens_total", "lookonce_decoder_accepted_draft_tokens_total"
    drafts_before, accepted_before = value(guessing, drafts), value(guessing, accepted)
    expected = await generate(plain, "what is there", max_tokens=60, **sampling)
    answer = await generate(guessing, "what is there", max_tokens=60, **sampling)
    assert answer.choices[0].text == expected.choices[0].text
    assert list(answer.choices[0].token_ids) == list(expected.choices[0].token_ids)
    assert len(answer.choices[0].logprobs) == len(expected.choices[0].logprobs)
    assert expected.usage.accepted_draft_tokens == 0
    assert 0 < answer.usage.accepted_draft_tokens < answer.usage.completion_tokens == 60
    assert value(plain, drafts) == 0
    assert value(guessing, accepted) - accepted_before == answer.usage.accepted_draft_tokens
    assert value(guessing, drafts) - drafts_before >= answer.usage.accepted_draft_tokens


async def test_a_stop_string_among_draft_tokens_ends_the_answer_at_the_same_place(
    plain: RunningDecoder, guessing: RunningDecoder
) -> None:
    """A step may sample tokens after the stop string. The caller does not get them."""
    text = (await generate(plain, "what is there", max_tokens=60)).choices[0].text
    num_inside = 0
    for length in range(4, len(text), 5):
        stop = text[length - 3 : length]
        expected = await generate(plain, "what is there", max_tokens=60, stop=[stop])
        answer = await generate(guessing, "what is there", max_tokens=60, stop=[stop])
        assert answer.choices[0] == expected.choices[0]
        assert answer.usage.completion_tokens == expected.usage.completion_tokens
        assert answer.usage.accepted_draft_tokens < answer.usage.completion_tokens
        num_inside += answer.usage.accepted_draft_tokens > 0
    assert num_inside > 0


async def test_a_stream_has_every_token_once(plain: RunningDecoder, guessing: RunningDecoder) -> None:
    request = params("what is there", logit_bias=FEW_WORDS, ignore_eos=True, max_tokens=60, logprobs=1)
    expected = (await plain.stub.Generate(pb.GenerateRequest(params=request), timeout=60)).choices[0]
    call = guessing.stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
    events = [event async for event in call]
    deltas = [event.delta for event in events[1:-1]]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(expected.token_ids)
    assert sum(len(delta.logprobs) for delta in deltas) == 60
    assert "".join(delta.text for delta in deltas) == expected.text
    assert events[-1].finished.usage.accepted_draft_tokens > 0
