"""Losing Redis costs time, never an answer: kill −9 while requests stream."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from lookonce.aio import AsyncClient
from lookonce.generation import Generation
from lookonce.local_stack import LocalStack
from tests.conftest import DEMO_MODEL, ONE_THREAD
from tests.e2e.pictures import QUESTION, Picture, fresh

NUM_TOKENS = 300


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    """A system of its own: this one is broken on purpose."""
    with LocalStack(DEMO_MODEL, encoder_arguments=ONE_THREAD, decoder_arguments=ONE_THREAD) as stack:
        yield stack


def kill_redis(stack: LocalStack) -> None:
    assert stack.redis is not None
    os.kill(stack.redis.pid, signal.SIGKILL)


async def stream_text(client: AsyncClient, started: asyncio.Event) -> tuple[int, ...]:
    stream = client.stream("Tell me about shapes.", max_tokens=NUM_TOKENS, ignore_eos=True)
    async for _ in stream:
        started.set()
    generation = stream.generation
    assert generation.finish_reason == "length"
    return generation.token_ids


async def describe(client: AsyncClient, picture: Picture) -> Generation:
    return await client.generate(QUESTION, images=[picture.data], max_tokens=16, timeout_s=30)


async def test_killing_redis_while_requests_stream_changes_no_answer(stack: LocalStack) -> None:
    cached, unseen = fresh(4), fresh(12)
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        expected = await stream_text(client, asyncio.Event())
        for picture in cached:
            assert (await describe(client, picture)).text == picture.answer
        started = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(stream_text(client, event)) for event in started]
        pictures = [asyncio.create_task(describe(client, picture)) for picture in unseen[:4]]
        for event in started:
            await event.wait()
        kill_redis(stack)
        pictures += [asyncio.create_task(describe(client, picture)) for picture in cached + unseen[4:]]
        results = await asyncio.gather(*pictures)
        assert [one.text for one in results] == [picture.answer for picture in unseen[:4] + cached + unseen[4:]]
        assert await asyncio.gather(*streams) == [expected] * 4


async def test_without_redis_text_and_pictures_go_on_and_caching_returns_with_it(stack: LocalStack) -> None:
    picture, later = fresh(2)
    kill_redis(stack)
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        assert (await describe(client, picture)).text == picture.answer
        assert stack.redis is not None
        stack.redis.start()
        (uploaded,) = await client.encode([later.data])
        for _ in range(50):
            if uploaded.encoding is not None and uploaded.encoding.stored:
                break
            await asyncio.sleep(0.2)
            (uploaded,) = await client.encode([later.data])
        assert uploaded.encoding is not None
        assert uploaded.encoding.stored
        assert (await describe(client, later)).text == later.answer


async def test_without_redis_any_of_several_encoders_gives_its_rows() -> None:
    """Calls go round the replicas: the one that is asked for rows is mostly not the one that encoded them."""
    pictures = fresh(12)
    with LocalStack(DEMO_MODEL, num_encoders=3, encoder_arguments=ONE_THREAD, decoder_arguments=ONE_THREAD) as stack:
        kill_redis(stack)
        async with AsyncClient.connect(stack.decoder_targets[0]) as client:
            answers = await asyncio.gather(*(describe(client, picture) for picture in pictures))
    assert [answer.text for answer in answers] == [picture.answer for picture in pictures]
