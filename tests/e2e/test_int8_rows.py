"""Stacks whose encoder stores int8 rows answer as native ones do, from half of bfloat16's bytes."""

from __future__ import annotations

import asyncio
import functools
import pathlib
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from demo.chats import Chat
from demo.evaluate import fresh_chats
from demo.model import MAX_NEW_TOKENS
from demo.scenes import png_bytes
from demo.wordings import Split
from lookonce.aio import AsyncClient
from lookonce.embedding_meta import RowDtype
from lookonce.generation import Message, Part
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.int8_rows import dequantise, quantise
from tests import tiny_models
from tests.conftest import DEMO_MODEL, SERVICE_FLAGS
from tests.e2e import test_generate_parity as parity
from tests.in_process_stack import InProcessStack
from tests.known_fingerprints import known_fingerprints

INT8 = ("--row-format", "int8")
NUM_QUESTIONS = 100
NUM_PROMPTS = 12
SEED = 20_261


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """One question of a chat, after the right answers to those before it."""

    messages: tuple[Message, ...]
    expected: str


def demo_questions() -> list[DemoQuestion]:
    return [
        question
        for chat in fresh_chats(NUM_QUESTIONS, SEED, Split.HELD_OUT)
        for question in questions_of(chat, [png_bytes(scene) for scene in chat.scenes])
    ]


def questions_of(chat: Chat, pictures: Sequence[bytes]) -> Iterator[DemoQuestion]:
    said = [] if chat.system is None else [Message("system", chat.system)]
    num_shown = 0
    for turn in chat.turns:
        new: list[Part] = list(pictures[num_shown : num_shown + turn.num_new_pictures])
        text: list[Part] = [turn.question.text]
        num_shown += len(new)
        said.append(Message("user", new + text if turn.pictures_first else text + new))
        yield DemoQuestion(tuple(said), turn.question.answer)
        said.append(Message("assistant", turn.question.answer))


@pytest.fixture(scope="module")
def stacks() -> Iterator[tuple[InProcessStack, InProcessStack]]:
    """The demo model natively and with int8 rows, on one cache."""
    with ExitStack() as exits:
        redis = exits.enter_context(EmbeddedRedis())
        yield (
            exits.enter_context(demo_stack(redis.url, *SERVICE_FLAGS)),
            exits.enter_context(demo_stack(redis.url, *SERVICE_FLAGS, *INT8)),
        )


def demo_stack(redis_url: str, *encoder_arguments: str) -> InProcessStack:
    return InProcessStack(
        DEMO_MODEL, redis=redis_url, encoder_arguments=encoder_arguments, decoder_arguments=SERVICE_FLAGS
    )


async def answers(stack: InProcessStack, questions: Sequence[DemoQuestion]) -> list[str]:
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        generations = await asyncio.gather(
            *(client.generate(question.messages, temperature=0.0, max_tokens=MAX_NEW_TOKENS) for question in questions)
        )
    return [generation.text.strip() for generation in generations]


async def test_the_demo_model_answers_as_with_native_rows(stacks: tuple[InProcessStack, InProcessStack]) -> None:
    questions = demo_questions()
    assert len(questions) == NUM_QUESTIONS
    native, int8 = [await answers(stack, questions) for stack in stacks]
    num_equal = sum(one == other for one, other in zip(native, int8, strict=True))
    num_right = [
        sum(answer == question.expected for answer, question in zip(given, questions, strict=True))
        for given in (native, int8)
    ]
    assert num_equal >= 0.98 * NUM_QUESTIONS
    assert num_right[1] >= num_right[0] - 0.02 * NUM_QUESTIONS >= 0.9 * NUM_QUESTIONS
    drifts = [stack.metric(stack.encoders, "lookonce_encoder_int8_relative_error_count") for stack in stacks]
    encodes = [stack.metric(stack.encoders, "lookonce_encoder_encodes_total") for stack in stacks]
    assert drifts == [0, encodes[0]]
    assert encodes[0] == encodes[1], "one model's native rows are no hit for its int8 rows"
    num_bytes, num_rows = [
        [stack.metric(stack.decoders, f"lookonce_decoder_embedding_fetch_{what}_total") for stack in stacks]
        for what in ("bytes", "rows")
    ]
    hidden_size = 128
    assert [num_bytes[0] / num_rows[0], num_bytes[1] / num_rows[1]] == [4 * hidden_size, 4 + hidden_size]


async def test_answers_equal_those_of_hugging_face_with_rounded_rows(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.BUILDERS["qwen2_vl"](tmp_path / "qwen2_vl")
    processor, model = tiny_models.load_processor(folder), tiny_models.load_model(folder)
    round_rows(model)
    rng = random.Random(12)
    chats = [parity.chat(processor, model, rng, (1, 3)[index % 2]) for index in range(NUM_PROMPTS)]
    with (
        known_fingerprints(folder, RowDtype.FLOAT32),
        InProcessStack(
            folder, dtype="float32", encoder_arguments=(*SERVICE_FLAGS, *INT8), decoder_arguments=SERVICE_FLAGS
        ) as stack,
    ):
        given = await asyncio.gather(*(parity.answer(stack.decoder_targets[0], one) for one in chats))
    assert given == [one.expected for one in chats]


def round_rows(model: Any) -> None:
    """Makes the whole model see its images' rows as int8."""
    image_features = model.model.get_image_features

    @functools.wraps(image_features)
    def rounded(*args: Any, **kwargs: Any) -> Any:
        features = image_features(*args, **kwargs)
        features.pooler_output = [
            dequantise(quantise(rows, 0).data, 0, torch.float32) for rows in features.pooler_output
        ]
        return features

    model.model.get_image_features = rounded
