"""Family features work over gRPC and Redis: several levels of rows, spans that must not be cut, texts around rows."""

from __future__ import annotations

import asyncio
import hashlib
import io
import pathlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import PIL.Image
import pytest
import torch

from lookonce.aio import AsyncClient
from lookonce.generation import Message
from lookonce.images import ImageRef
from tests import tiny_models
from tests.conftest import SERVICE_FLAGS
from tests.in_process_stack import InProcessStack
from tests.parity import offline
from tests.parity.families import SIZES
from tests.tiny_families import FAMILIES

MAX_TOKENS = 6
# Above the spans that must not be cut, below most prompts.
TOKEN_BUDGET = 40


@dataclass(frozen=True, slots=True)
class Chat:
    """One user turn and what `generate` answers."""

    # Texts and PNG files.
    parts: tuple[str | bytes, ...]
    expected: list[int]

    @property
    def pictures(self) -> list[bytes]:
        """Returns the PNG files among the parts."""
        return [part for part in self.parts if isinstance(part, bytes)]


@dataclass(frozen=True, slots=True)
class Served:
    """A family's running services and its questions."""

    name: str
    stack: InProcessStack
    chats: list[Chat]


@pytest.fixture(scope="module", params=["gemma3", "idefics3", "llava_onevision", "qwen3_vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name = request.param
    folder = FAMILIES[name].build(tmp_path_factory.mktemp("families") / name)
    chats = questions(name, folder)
    decoder = (*SERVICE_FLAGS, "--max-num-batched-tokens", str(TOKEN_BUDGET), "--max-num-seqs", "12")
    with InProcessStack(folder, dtype="float32", encoder_arguments=SERVICE_FLAGS, decoder_arguments=decoder) as stack:
        yield Served(name, stack, chats)


def questions(name: str, folder: pathlib.Path) -> list[Chat]:
    """With 0, 1 and 3 pictures in turn."""
    processor, model = FAMILIES[name].load_processor(folder), tiny_models.load_model(folder)
    rng = random.Random(5)
    chats = []
    for index in range(12):
        images = [
            tiny_models.random_image(rng.randrange(6), *SIZES[(index + number) % len(SIZES)])
            for number in range((0, 1, 3)[index % 3])
        ]
        parts: list[str | PIL.Image.Image] = [*images]
        parts.insert(rng.randint(0, len(images)), " ".join(rng.choices(offline.WORDS, k=rng.randint(3, 9))))
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        bos = processor.tokenizer.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        nested = [images] if images else None
        inputs = processor(text=text, images=nested, return_tensors="pt", add_special_tokens=not has_bos)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False)
        answer = output[0, inputs["input_ids"].shape[1] :].tolist()
        chats.append(Chat(tuple(part if isinstance(part, str) else png(part) for part in parts), answer))
    return chats


def png(image: PIL.Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def answer(target: str, one: Chat, *, by_digest: bool = False) -> list[int]:
    parts = [
        ImageRef.from_digest(hashlib.sha256(part).digest()) if by_digest and isinstance(part, bytes) else part
        for part in one.parts
    ]
    async with AsyncClient.connect(target) as client:
        generation = await client.generate(
            [Message("user", parts)], max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS, temperature=0.0
        )
        return list(generation.token_ids)


async def assert_known(served: Served, picture: bytes) -> None:
    """A picture of a prompt with three: the cache knows it as it stands there."""
    async with AsyncClient.connect(served.stack.decoder_targets[0]) as client:
        tells_apart = served.name == "llava_onevision"
        ref = ImageRef.from_bytes(picture, beside_others=tells_apart)
        assert await client.lookup([ref]) == [True]
        encoded = (await client.encode([ref]))[0].encoding
    assert encoded is not None


async def test_answers_are_those_of_generate_and_each_picture_is_encoded_once(served: Served) -> None:
    (target,) = served.stack.decoder_targets
    for _ in ("cold", "cached"):
        answers = await asyncio.gather(*(answer(target, one) for one in served.chats))
        assert answers == [one.expected for one in served.chats]
    by_digest = await asyncio.gather(*(answer(target, one, by_digest=True) for one in served.chats))
    assert by_digest == answers, "the cache knows the pictures' sizes, so their texts and spans are the same"
    await assert_known(served, served.chats[2].pictures[0])
    # This family processes a picture in two ways: alone, and beside others.
    tells_apart = served.name == "llava_onevision"
    rows = {(part, tells_apart and len(one.pictures) > 1) for one in served.chats for part in one.pictures}
    assert served.stack.metric(served.stack.encoders, "lookonce_encoder_encodes_total") == len(rows)
