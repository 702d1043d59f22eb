"""Log probabilities of prompts: those of transformers, however the prompt is computed."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import PIL.Image
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from lookonce import AsyncClient, Message, TokenPrompt
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder
from tests.e2e.pictures import fresh
from tests.in_process_stack import InProcessStack

TEXTS = ["red", "What is in the picture? A green star, and nothing more than that, I am sure. " * 4]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "deterministic": {"deterministic": True},
    "speculation": {"speculative_tokens": 4, "speculative_ngram_min": 1},
    "process": {"engine": "process"},
    "two processes": {"tensor_parallel_size": 2},
    # Requests are preempted, and computed again.
    "few blocks": {"num_kv_blocks": 18, "max_context_tokens": 256, "max_num_seqs": 8},
}


@pytest.fixture(params=WAYS)
async def decoder(request: pytest.FixtureRequest) -> AsyncIterator[RunningDecoder]:
    async with running_decoder(DEMO_MODEL, **{"dtype": "float32", "block_size": 8, **WAYS[request.param]}) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


def reference(model: Any, ids: Sequence[int], **images: Any) -> torch.Tensor:
    """Returns the log probabilities of all tokens behind each token but the last, `[num_tokens - 1, vocab]`."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), **images).logits[0, :-1]
    return logits.log_softmax(-1)


def check(
    entries: Sequence[Sequence[tuple[int, float]]], expected: torch.Tensor, ids: Sequence[int], number: int
) -> None:
    """Compares the log probabilities of text tokens; those of images are empty."""
    assert len(entries) == len(ids) - 1
    for entry, of_place, token_id in zip(entries, expected, ids[1:], strict=True):
        if not entry:
            continue
        assert entry[0][0] == token_id
        assert len(entry) == 1 + number
        found = torch.tensor([value for _, value in entry])
        assert torch.allclose(found[0], of_place[token_id], atol=2e-3)
        assert torch.allclose(found[1:], of_place.topk(number).values, atol=2e-3)


async def test_they_are_those_of_transformers(decoder: RunningDecoder, model: Any) -> None:
    async def ask(text: str, number: int) -> None:
        asked = params(text, max_tokens=12, min_tokens=12, temperature=0.0, prompt_logprobs=number)
        response = await decoder.stub.Generate(pb.GenerateRequest(params=asked))
        ids = (await decoder.stub.Tokenize(pb.TokenizeRequest(chat=asked.chat))).token_ids
        entries = [[(one.token_id, one.logprob) for one in place.top] for place in response.prompt_logprobs]
        assert all(entries)
        check(entries, reference(model, ids), ids, number)
        assert response.usage.cached_prompt_tokens == 0
        assert len(response.choices[0].token_ids) == 12
        assert not response.choices[0].logprobs
        plain = params(text, max_tokens=12, min_tokens=12, temperature=0.0)
        other = await decoder.stub.Generate(pb.GenerateRequest(params=plain))
        assert other.choices[0].token_ids == response.choices[0].token_ids
        assert not other.prompt_logprobs

    # Many at once, some of them beside each other and some beside plain answers.
    await asyncio.gather(*(ask(text, number) for text in TEXTS for number in (0, 3)))


async def test_several_answers_come_with_them_once(model: Any) -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32") as decoder:
        asked = params(TEXTS[1], max_tokens=4, n=3, prompt_logprobs=1, logprobs=2, seed=5)
        response = await decoder.stub.Generate(pb.GenerateRequest(params=asked))
        ids = (await decoder.stub.Tokenize(pb.TokenizeRequest(chat=asked.chat))).token_ids
        entries = [[(one.token_id, one.logprob) for one in place.top] for place in response.prompt_logprobs]
        check(entries, reference(model, ids), ids, 1)
        assert [len(choice.logprobs) for choice in response.choices] == [
            len(choice.token_ids) for choice in response.choices
        ]
        assert all(len(place.top) == 3 for choice in response.choices for place in choice.logprobs)


async def test_tokens_of_images_have_none_and_those_behind_them_know_the_image(model: Any) -> None:
    processor: Any = AutoProcessor.from_pretrained(DEMO_MODEL)
    found = []
    with InProcessStack(DEMO_MODEL, num_encoders=1, num_decoders=1) as stack:
        async with AsyncClient.connect(stack.decoder_targets[0]) as client:
            for picture in fresh(2):
                chat = [Message("user", [picture.data, "What is in the picture?"])]
                answer = await client.generate(chat, max_tokens=1, prompt_logprobs=2)
                prompt = await client.tokenize(chat)
                image = PIL.Image.open(io.BytesIO(picture.data)).convert("RGB")
                pixels = processor.image_processor(images=[image], return_tensors="pt")
                (span,) = prompt.images
                are_empty = [not entry for entry in answer.prompt_logprobs]
                in_image = range(span.offset, span.offset + span.length)
                assert are_empty == [place in in_image for place in range(1, len(prompt.token_ids))]
                check(answer.prompt_logprobs, reference(model, prompt.token_ids, **pixels), prompt.token_ids, 2)
                found.append(answer.prompt_logprobs)
    assert found[0] != found[1]


async def test_each_token_has_an_entry_also_if_all_stand_for_an_image() -> None:
    with InProcessStack(DEMO_MODEL, num_encoders=1, num_decoders=1) as stack:
        async with AsyncClient.connect(stack.decoder_targets[0]) as client:
            (picture,) = fresh(1)
            chat = await client.tokenize([Message("user", [picture.data])])
            (span,) = chat.images
            image_id = chat.token_ids[span.offset]
            for ids in ([image_id], [5, image_id]):
                answer = await client.generate(TokenPrompt(ids, [picture.data]), max_tokens=2, prompt_logprobs=1)
                num_tokens = len(ids) - 1 + span.length
                assert answer.prompt_logprobs is not None
                assert [len(entry) for entry in answer.prompt_logprobs] == [0] * (num_tokens - 1)


async def test_what_is_refused_is_named() -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32", max_logprobs=100) as decoder:
        for text, number, message in (
            ("x", 101, "sampling.prompt_logprobs: must be in [0, 100], got 101"),
            ("a b " * 800, 100, "sampling.prompt_logprobs: "),
        ):
            asked = params(text, max_tokens=1, prompt_logprobs=number)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decoder.stub.Generate(pb.GenerateRequest(params=asked))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(caught.value.details()).startswith(message)
        stream = decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=params("x", prompt_logprobs=0)))
        with pytest.raises(grpc.aio.AioRpcError, match="is not for streams"):
            await anext(aiter(stream))
