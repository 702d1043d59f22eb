"""Likelihoods of continuations: those of transformers, token by token, whatever the prompt and the settings are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForImageTextToText

from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.decoders import RunningDecoder, running_decoder

# Tests share decoders, so they share an event loop, too.
pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = [" red", "a green star in the centre", "?", "x" * 90]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "deterministic": {"deterministic": True},
    "few blocks": {"num_kv_blocks": 24, "max_context_tokens": 300},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def decoder(request: pytest.FixtureRequest) -> AsyncIterator[RunningDecoder]:
    async with running_decoder(DEMO_MODEL, dtype="float32", **WAYS[request.param]) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


def prompt(kind: str) -> pb.GenerateParams:
    text = "What is in the picture? Answer in one word, and say nothing more than that:"
    if kind == "chat":
        message = pb.ChatMessage(role=pb.ROLE_USER, parts=[pb.ContentPart(text=text)])
        return pb.GenerateParams(chat=pb.ChatPrompt(messages=[message]))
    return pb.GenerateParams(text=pb.TextPrompt(text=f"<bos>{text}"))


async def prompt_ids(decoder: RunningDecoder, params: pb.GenerateParams) -> list[int]:
    request = pb.TokenizeRequest(chat=params.chat) if params.HasField("chat") else pb.TokenizeRequest(text=params.text)
    return list((await decoder.stub.Tokenize(request)).token_ids)


def reference(model: Any, prompt_ids: list[int], token_ids: list[int]) -> tuple[torch.Tensor, bool]:
    """Returns the log probability of each token in transformers, and whether all are the likeliest ones."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
    chosen = torch.tensor(token_ids)
    logprobs = logits.double().log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    return logprobs, bool((logits.argmax(-1) == chosen).all())


def greedy(model: Any, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Returns the likeliest tokens, also those that end an answer."""
    ids = list(prompt_ids)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_scores_are_those_of_transformers(decoder: RunningDecoder, model: Any, kind: str) -> None:
    params = prompt(kind)
    ids = await prompt_ids(decoder, params)
    likeliest = greedy(model, ids, 40)
    continuations = [pb.Continuation(text=text) for text in TEXTS]
    continuations.append(pb.Continuation(tokens=pb.ContinuationTokens(token_ids=likeliest)))
    response = await decoder.stub.Score(pb.ScoreRequest(params=params, continuations=continuations))
    for score in response.scores:
        expected, is_greedy = reference(model, ids, list(score.token_ids))
        assert torch.allclose(torch.tensor(score.token_logprobs).double(), expected, atol=2e-4)
        assert score.logprob == pytest.approx(float(expected.sum()), abs=1e-3)
        assert score.is_greedy == is_greedy
        assert not score.logprobs
    assert [score.is_greedy for score in response.scores][-1]
    assert not all(score.is_greedy for score in response.scores)
    for text, score in zip(TEXTS, response.scores, strict=False):
        detokenized = await decoder.stub.Detokenize(pb.DetokenizeRequest(token_ids=score.token_ids))
        assert detokenized.text == text
    usage = response.usage
    assert usage.prompt_tokens == len(ids)
    assert usage.completion_tokens == sum(len(score.token_ids) for score in response.scores)


async def test_alternatives_and_one_prompt_for_all(model: Any) -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32") as decoder:
        params = prompt("chat")
        request = pb.ScoreRequest(
            params=params, continuations=[pb.Continuation(text=text) for text in TEXTS], logprobs=2
        )
        first = await decoder.stub.Score(request)
        for score in first.scores:
            assert len(score.logprobs) == len(score.token_ids)
            for position, token_id, logprob in zip(score.logprobs, score.token_ids, score.token_logprobs, strict=True):
                assert (position.top[0].token_id, position.top[0].logprob) == (token_id, logprob)
                assert len(position.top) == 3
                assert position.top[1].logprob >= max(position.top[2].logprob, logprob)
        alone = await decoder.stub.Score(pb.ScoreRequest(params=params, continuations=[pb.Continuation(text=TEXTS[1])]))
        assert list(alone.scores[0].token_logprobs) == pytest.approx(list(first.scores[1].token_logprobs), abs=1e-5)
        assert alone.usage.cached_prompt_tokens > 0


async def test_a_text_that_would_share_a_token_with_the_prompt_has_tokens_of_its_own(model: Any) -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32") as decoder:
        params = pb.GenerateParams(text=pb.TextPrompt(text="<bos>What is in the pic"))
        ids = await prompt_ids(decoder, params)
        texts = ["ture of a circle", "ture?"]
        continuations = [pb.Continuation(text=text) for text in texts]
        response = await decoder.stub.Score(pb.ScoreRequest(params=params, continuations=continuations))
        for text, score in zip(texts, response.scores, strict=True):
            assert (await decoder.stub.Detokenize(pb.DetokenizeRequest(token_ids=score.token_ids))).text == text
            expected, _ = reference(model, ids, list(score.token_ids))
            assert score.logprob == pytest.approx(float(expected.sum()), abs=1e-3)


REFUSED: dict[str, tuple[pb.ScoreRequest, str]] = {
    "none": (pb.ScoreRequest(params=prompt("chat")), "continuations"),
    "empty": (pb.ScoreRequest(params=prompt("chat"), continuations=[pb.Continuation(text="")]), "continuations[0]"),
    "unset": (pb.ScoreRequest(params=prompt("chat"), continuations=[pb.Continuation()]), "continuations[0]"),
    "ids": (
        pb.ScoreRequest(
            params=prompt("chat"), continuations=[pb.Continuation(tokens=pb.ContinuationTokens(token_ids=[600]))]
        ),
        "continuations",
    ),
    "too many": (
        pb.ScoreRequest(params=prompt("chat"), continuations=[pb.Continuation(text="x")] * 129),
        "continuations",
    ),
    "sampling": (
        pb.ScoreRequest(
            params=pb.GenerateParams(text=pb.TextPrompt(text="x"), sampling=pb.SamplingParams()),
            continuations=[pb.Continuation(text="x")],
        ),
        "params.sampling",
    ),
    "alternatives": (
        pb.ScoreRequest(params=prompt("chat"), continuations=[pb.Continuation(text="x")], logprobs=100),
        "logprobs",
    ),
}


async def test_what_is_refused_is_named() -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32") as decoder:
        for case, (request, field) in REFUSED.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decoder.stub.Score(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, case
            assert str(caught.value.details()).startswith(field), (case, caught.value.details())
        long = pb.ScoreRequest(params=prompt("chat"), continuations=[pb.Continuation(text="x " * 3000)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decoder.stub.Score(long)
        assert "context" in str(caught.value.details())
