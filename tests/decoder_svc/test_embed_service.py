"""Embeddings of prompts: the hidden states of transformers, however the prompt is computed."""

from __future__ import annotations

import asyncio
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
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder

# Tests share decoders, so they share an event loop, too.
pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["red", "What is in the picture? A green star, and nothing more than that, I am sure. " * 4]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "deterministic": {"deterministic": True},
    "speculation": {"speculative_tokens": 4, "speculative_ngram_min": 1},
}
POOLINGS = [pb.POOLING_LAST, pb.POOLING_MEAN]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def decoder(request: pytest.FixtureRequest) -> AsyncIterator[RunningDecoder]:
    async with running_decoder(DEMO_MODEL, dtype="float32", **WAYS[request.param]) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


def prompt(text: str) -> pb.GenerateParams:
    asked = params(text)
    asked.ClearField("sampling")
    return asked


async def reference(decoder: RunningDecoder, model: Any, text: str) -> torch.Tensor:
    """Returns the last hidden states of transformers, `[num_tokens, hidden_size]`."""
    ids = (await decoder.stub.Tokenize(pb.TokenizeRequest(chat=prompt(text).chat))).token_ids
    with torch.inference_mode():
        hidden: torch.Tensor = model.model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("pooling", POOLINGS)
async def test_embeddings_are_those_of_transformers(
    decoder: RunningDecoder, model: Any, pooling: pb.Pooling.ValueType
) -> None:
    for text in (*TEXTS, *TEXTS):
        hidden = await reference(decoder, model, text)
        expected = hidden[-1] if pooling == pb.POOLING_LAST else hidden.mean(0)
        response = await decoder.stub.Embed(pb.EmbedRequest(params=prompt(text), pooling=pooling, keep_length=True))
        assert torch.allclose(torch.tensor(response.embedding), expected, atol=2e-4)
        usage = response.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(hidden), 0)
        if pooling == pb.POOLING_MEAN:
            assert usage.cached_prompt_tokens == 0
        normal = await decoder.stub.Embed(pb.EmbedRequest(params=prompt(text), pooling=pooling))
        direction = expected / expected.norm()
        assert torch.allclose(torch.tensor(normal.embedding), direction, atol=2e-4)


async def test_many_at_once_beside_answers(decoder: RunningDecoder, model: Any) -> None:
    texts = [f"{word} {number}" for number in range(4) for word in ("red", "blue star", "what is it")]
    calls = [
        decoder.stub.Embed(pb.EmbedRequest(params=prompt(text), pooling=POOLINGS[i % 2]))
        for i, text in enumerate(texts)
    ]
    answers = [decoder.stub.Generate(pb.GenerateRequest(params=params(text, max_tokens=6))) for text in texts]
    found, _ = await asyncio.gather(asyncio.gather(*calls), asyncio.gather(*answers))
    for index, (text, response) in enumerate(zip(texts, found, strict=True)):
        hidden = await reference(decoder, model, text)
        expected = hidden[-1] if POOLINGS[index % 2] == pb.POOLING_LAST else hidden.mean(0)
        assert torch.allclose(torch.tensor(response.embedding), expected / expected.norm(), atol=2e-4)


async def test_what_is_refused_is_named() -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32") as decoder:
        for request, field in (
            (pb.EmbedRequest(params=params("x")), "params.sampling"),
            (pb.EmbedRequest(params=prompt("x"), pooling=9), "pooling"),  # type: ignore[arg-type]
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decoder.stub.Embed(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(caught.value.details()).startswith(field)


@pytest.mark.parametrize("way", WAYS)
async def test_a_prompt_may_fill_the_context(way: str, model: Any) -> None:
    """Nothing is generated, so there need be no room for an answer."""
    text = TEXTS[1]
    async with running_decoder(DEMO_MODEL, dtype="float32", **WAYS[way]) as decoder:
        hidden = await reference(decoder, model, text)
    num_blocks = -(-len(hidden) // 16)
    sizes: dict[str, Any] = {"max_context_tokens": len(hidden), "num_kv_blocks": num_blocks, "block_size": 16}
    async with running_decoder(DEMO_MODEL, dtype="float32", **sizes, **WAYS[way]) as decoder:
        for pooling, expected in zip(POOLINGS, (hidden[-1], hidden.mean(0)), strict=True):
            request = pb.EmbedRequest(params=prompt(text), pooling=pooling, keep_length=True)
            response = await decoder.stub.Embed(request)
            assert torch.allclose(torch.tensor(response.embedding), expected, atol=2e-4)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decoder.stub.Embed(pb.EmbedRequest(params=prompt(f"{text} more")))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="plus 1 to generate are over the context"):
            await decoder.stub.Generate(pb.GenerateRequest(params=params(text)))
