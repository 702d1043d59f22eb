"""An image is looked at once: counted by the encoder's own metric, with answers that only the right picture gives."""

from __future__ import annotations

import asyncio

from lookonce.aio import AsyncClient
from lookonce.generation import Generation
from lookonce.images import ImageRef
from lookonce.local.local_stack import LocalStack
from tests.e2e.pictures import QUESTION, Picture, fresh


def num_encodes(stack: LocalStack) -> int:
    return int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))


async def answers(stack: LocalStack, pictures: list[Picture], requests_per_decoder: int) -> list[Generation]:
    """All requests at once, pictures in turn, the same ones on every decoder."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(ask(target, pictures[index % len(pictures)]))
            for target in stack.decoder_targets
            for index in range(requests_per_decoder)
        ]
    return [task.result() for task in tasks]


async def ask(target: str, picture: Picture) -> Generation:
    async with AsyncClient.connect(target) as client:
        return await client.generate(QUESTION, images=[picture.data], max_tokens=16)


async def test_sixteen_requests_on_two_decoders_encode_four_pictures_four_times(stack: LocalStack) -> None:
    pictures = fresh(4)
    before = num_encodes(stack)
    generations = await answers(stack, pictures, requests_per_decoder=8)
    assert num_encodes(stack) - before == 4
    assert [one.text for one in generations] == [pictures[index % 4].answer for _ in range(2) for index in range(8)]


async def test_the_second_question_about_a_picture_encodes_nothing(stack: LocalStack) -> None:
    (picture,) = fresh(1)
    first = await ask(stack.decoder_targets[0], picture)
    before = num_encodes(stack)
    second = await ask(stack.decoder_targets[0], picture)
    elsewhere = await ask(stack.decoder_targets[1], picture)
    assert num_encodes(stack) == before
    assert first.usage.encoded_image_tokens == first.usage.image_tokens > 0
    for later in (second, elsewhere):
        assert later.usage.encoded_image_tokens == 0
        assert later.usage.cached_image_tokens + later.usage.skipped_image_tokens == later.usage.image_tokens
        assert later.text == first.text == picture.answer
    assert elsewhere.usage.skipped_image_tokens == 0


async def test_an_uploaded_picture_is_asked_about_by_digest(stack: LocalStack) -> None:
    (picture,) = fresh(1)
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        (uploaded,) = await client.encode([picture.data])
        reference = ImageRef.from_digest(uploaded.digest)
        generation = await client.generate(QUESTION, images=[reference], max_tokens=16)
        assert await client.lookup([reference]) == [True]
    assert generation.text == picture.answer
    assert generation.usage.encoded_image_tokens == 0
