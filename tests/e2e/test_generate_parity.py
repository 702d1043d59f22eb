"""The whole way over gRPC and Redis equals Hugging Face `generate`: encoder, cache, decoder, many requests at once."""

from __future__ import annotations

import asyncio
import io
import pathlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lookonce.aio import AsyncClient
from lookonce.generation import Message
from tests import tiny_models
from tests.conftest import SERVICE_FLAGS
from tests.in_process_stack import InProcessStack

NUM_PROMPTS = 24
MAX_TOKENS = 8
WORDS = "what colour is the small cat near a red boat and why do you see it".split()
# Chunks of at most so many tokens over all requests: most of them end inside an image.
TOKEN_BUDGET = 24


@dataclass(frozen=True, slots=True)
class Chat:
    """One user turn and what `generate` answers."""

    # Texts and PNG files.
    parts: tuple[str | bytes, ...]
    expected: list[int]


@pytest.fixture(scope="module", params=["llava_siglip", "qwen2_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path: pathlib.Path = tmp_path_factory.mktemp("models") / request.param
    return tiny_models.BUILDERS[request.param](path)


@pytest.fixture(scope="module")
def chats(folder: pathlib.Path) -> list[Chat]:
    processor, model = tiny_models.load_processor(folder), tiny_models.load_model(folder)
    rng = random.Random(11)
    return [chat(processor, model, rng, (0, 1, 3)[index % 3]) for index in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def stack(folder: pathlib.Path) -> Iterator[InProcessStack]:
    decoder = (*SERVICE_FLAGS, "--max-num-batched-tokens", str(TOKEN_BUDGET), "--encoder-cache-rows", "60")
    with InProcessStack(
        folder, dtype="float32", num_decoders=2, encoder_arguments=SERVICE_FLAGS, decoder_arguments=decoder
    ) as stack:
        yield stack


def chat(processor: Any, model: Any, rng: random.Random, num_images: int) -> Chat:
    parts: list[str | Any] = [
        tiny_models.random_image(rng.randrange(10), rng.choice((60, 90, 140)), rng.choice((56, 100)))
        for _ in range(num_images)
    ]
    parts.insert(rng.randint(0, num_images), " ".join(rng.choices(WORDS, k=rng.randint(3, 12))))
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [part for part in parts if not isinstance(part, str)]
    has_bos = processor.tokenizer.bos_token is not None and text.startswith(processor.tokenizer.bos_token)
    inputs = processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=not has_bos)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False)
    return Chat(
        tuple(part if isinstance(part, str) else png(part) for part in parts),
        output[0, inputs["input_ids"].shape[1] :].tolist(),
    )


def png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def answer(target: str, one: Chat) -> list[int]:
    async with AsyncClient.connect(target) as client:
        generation = await client.generate(
            [Message("user", one.parts)], max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS, temperature=0.0
        )
        return list(generation.token_ids)


async def test_all_at_once_cold_and_then_cached(stack: InProcessStack, chats: list[Chat]) -> None:
    expected = [one.expected for one in chats]
    for target in stack.decoder_targets:
        answers = await asyncio.gather(*(answer(target, one) for one in chats))
        assert answers == expected
    pictures = {part for one in chats for part in one.parts if isinstance(part, bytes)}
    assert stack.metric(stack.encoders, "lookonce_encoder_encodes_total") == len(pictures)


async def test_streams_carry_the_same_tokens(stack: InProcessStack, chats: list[Chat]) -> None:
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        for one in chats[:6]:
            stream = client.stream([Message("user", one.parts)], max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS)
            text = "".join([piece async for piece in stream])
            assert list(stream.generation.token_ids) == one.expected
            assert stream.generation.text == text
