"""Embeddings of prompts with pictures: those of transformers, in both clients and both kinds of engines."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import PIL.Image
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from lookonce import AsyncClient, Client, Message
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import InternalError, InvalidParameterError
from lookonce.generation import Pooling
from lookonce.local.local_stack import LocalStack
from lookonce.sdk.answers import embedding_of
from tests.conftest import DEMO_MODEL, ONE_THREAD
from tests.e2e.pictures import QUESTION, fresh

POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


def reference(model: Any, token_ids: Sequence[int], data: bytes, pooling: Pooling) -> list[float]:
    """Returns the embedding that transformers computes, of length 1."""
    processor = AutoImageProcessor.from_pretrained(DEMO_MODEL, use_fast=False)
    pixels = processor(PIL.Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        hidden = model.model(input_ids=torch.tensor([list(token_ids)]), pixel_values=pixels).last_hidden_state[0]
    chosen = hidden[-1] if pooling == "last" else hidden.mean(0)
    return [float(value) for value in chosen / chosen.norm()]


def distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the largest difference between two values of the same place."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def unlike(client: Client, model: Any) -> tuple[bytes, bytes]:
    """Returns two new pictures whose embeddings differ, in each pooling, by more than twice what the test lets pass."""
    while True:
        first, second = (picture.data for picture in fresh(2))
        token_ids = client.tokenize(QUESTION, [first]).token_ids
        pairs = [[reference(model, token_ids, data, pooling) for data in (first, second)] for pooling in POOLINGS]
        if min(distance(*pair) for pair in pairs) > 5e-2:
            return first, second


def test_a_picture_has_its_own_embedding_that_of_transformers(stack: LocalStack, model: Any) -> None:
    with Client.connect(stack.decoder_targets[0]) as client:
        first, second = unlike(client, model)
        for pooling in POOLINGS:
            found = [client.embed(QUESTION, [data], pooling=pooling) for data in (first, second, first)]
            token_ids = client.tokenize(QUESTION, [first]).token_ids
            for data, one in zip((first, second, first), found, strict=True):
                assert one.embedding == pytest.approx(reference(model, token_ids, data, pooling), abs=2e-2)
                assert math.fsum(value * value for value in one.embedding) == pytest.approx(1, abs=1e-5)
                assert one.usage.completion_tokens == 0
                assert one.usage.prompt_tokens == len(token_ids)
            assert found[0].embedding == pytest.approx(found[2].embedding, abs=1e-4)
            assert distance(found[0].embedding, found[1].embedding) > 1e-2
            assert found[2].usage.encoded_image_tokens == 0
            assert (found[2].usage.cached_prompt_tokens > 0) == (pooling == "last")


async def test_the_other_client_and_an_engine_process(model: Any) -> None:
    (picture,) = fresh(1)
    flags = (*ONE_THREAD, "--engine", "process")
    with LocalStack(DEMO_MODEL, dtype="float32", decoder_arguments=flags) as stack:
        async with AsyncClient.connect(stack.decoder_targets[0]) as client:
            token_ids = (await client.tokenize(QUESTION, [picture.data])).token_ids
            for pooling in POOLINGS:
                found = await client.embed(QUESTION, [picture.data], pooling=pooling)
                assert found.embedding == pytest.approx(reference(model, token_ids, picture.data, pooling), abs=2e-3)
                whole = await client.embed(QUESTION, [picture.data], pooling=pooling, normalize=False)
                length = math.sqrt(math.fsum(value * value for value in whole.embedding))
                assert [value / length for value in whole.embedding] == pytest.approx(found.embedding, abs=1e-5)
            chat = await client.embed([Message("user", [picture.data, QUESTION])])
            assert len(chat.embedding) == len(found.embedding)


def test_wrong_values_are_named(stack: LocalStack) -> None:
    with Client.connect(stack.decoder_targets[0]) as client:
        for options, field in (({"pooling": "first"}, "pooling"), ({"temperature": 0.5}, "temperature")):
            with pytest.raises(InvalidParameterError) as caught:
                client.embed("x", **options)
            assert caught.value.field == field


def test_a_missing_embedding_is_an_error() -> None:
    with pytest.raises(InternalError, match="no embedding"):
        embedding_of(pb.EmbedResponse(request_id="one"))
