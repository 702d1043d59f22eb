"""Loss of Redis costs time and no answer, whether it is killed, emptied or frozen while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from lookonce.aio import AsyncClient
from lookonce.local.redis_server import EmbeddedRedis
from tests.conftest import ONE_THREAD
from tests.faults.conftest import STORY, STORY_TOKENS, Fingerprint, Picture, describe
from tests.in_process_stack import InProcessStack

# The decoder has room for two pictures, so that others are fetched again.
DECODER = (*ONE_THREAD, "--encoder-cache-rows", "60")


@pytest.fixture(scope="module")
def running(fingerprint: Fingerprint) -> Iterator[InProcessStack]:
    with InProcessStack(
        fingerprint.folder, num_encoders=2, encoder_arguments=ONE_THREAD, decoder_arguments=DECODER
    ) as stack:
        yield stack


@pytest.fixture
async def stack(running: InProcessStack, fingerprint: Fingerprint) -> AsyncIterator[InProcessStack]:
    """A stack whose Redis is up and in use again after an earlier test."""
    yield running
    server(running).start()
    async with AsyncClient.connect(running.decoder_targets[0], max_retries=0) as client:
        await until_stored(client, fingerprint.fresh(1)[0])


@pytest.fixture
async def client(stack: InProcessStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient.connect(stack.decoder_targets[0], max_retries=0) as client:
        yield client


def server(stack: InProcessStack) -> EmbeddedRedis:
    assert stack.redis is not None
    return stack.redis


def kill_redis(stack: InProcessStack) -> None:
    os.kill(server(stack).pid, signal.SIGKILL)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until_stored(client: AsyncClient, picture: Picture) -> None:
    """Waits until the encoders write to Redis."""
    async with asyncio.timeout(30):
        while True:
            (uploaded,) = await client.encode([picture.data])
            if uploaded.encoding is not None and uploaded.encoding.stored:
                return
            await asyncio.sleep(0.1)


async def stream_story(client: AsyncClient, started: asyncio.Event) -> tuple[int, ...]:
    stream = client.stream(STORY, max_tokens=STORY_TOKENS, temperature=0.0)
    async for _ in stream:
        started.set()
    return stream.generation.token_ids


async def check_answers(client: AsyncClient, pictures: list[Picture]) -> None:
    answers = await asyncio.gather(*(describe(client, picture) for picture in pictures))
    assert [answer.token_ids for answer in answers] == [picture.token_ids for picture in pictures]


def num_encodes(stack: InProcessStack) -> int:
    return int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))


async def test_killing_redis_while_requests_stream_changes_no_answer(
    stack: InProcessStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    cached, unseen = fingerprint.fresh(4), fingerprint.fresh(12)
    await check_answers(client, cached)
    started = [asyncio.Event() for _ in range(4)]
    streams = [asyncio.create_task(stream_story(client, event)) for event in started]
    before = asyncio.create_task(check_answers(client, unseen[:4]))
    for event in started:
        await event.wait()
    kill_redis(stack)
    await check_answers(client, cached + unseen[4:])
    await before
    assert await asyncio.gather(*streams) == [fingerprint.story] * 4


async def test_without_redis_pictures_are_still_answered_and_caching_resumes_later(
    stack: InProcessStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    picture, later = fingerprint.fresh(2)
    kill_redis(stack)
    await check_answers(client, [picture])
    server(stack).start()
    await until_stored(client, later)
    await check_answers(client, [later, picture])


async def test_without_redis_any_of_several_encoders_gives_its_rows(
    stack: InProcessStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    """Calls rotate over the replicas, so that rows are mostly requested from one that did not encode them."""
    pictures = fingerprint.fresh(12)
    kill_redis(stack)
    await check_answers(client, pictures)
    await check_answers(client, pictures)


async def test_emptying_redis_again_and_again_changes_no_answer(
    stack: InProcessStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    cached, unseen = fingerprint.fresh(8), fingerprint.fresh(24)
    await check_answers(client, cached)
    emptied = asyncio.Event()

    def empty() -> None:
        with redis.Redis.from_url(server(stack).url) as connection:
            while not emptied.is_set():
                connection.flushall()
                # An endless loop would take the processor from those it should disturb.
                time.sleep(0.002)

    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(empty))
        try:
            await check_answers(client, cached + unseen + cached)
        finally:
            emptied.set()
    await check_answers(client, unseen)


async def test_while_redis_is_frozen_pictures_are_encoded_anew(
    stack: InProcessStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    cached, unseen = fingerprint.fresh(8), fingerprint.fresh(8)
    await check_answers(client, cached)
    num_before = num_encodes(stack)
    with frozen(server(stack).pid):
        await check_answers(client, unseen)
        # Calls rotate over the encoders, so that one of the two orders reaches one that has not seen the pictures.
        for picture in (*cached, *cached[1:], cached[0]):
            await check_answers(client, [picture])
        assert num_encodes(stack) - num_before > len(unseen)
        assert await stream_story(client, asyncio.Event()) == fingerprint.story
    await until_stored(client, fingerprint.fresh(1)[0])
    await check_answers(client, cached + unseen)


async def test_redis_that_freezes_and_goes_on_changes_no_answer(
    stack: InProcessStack, client: AsyncClient, fingerprint: Fingerprint
) -> None:
    """A reply that arrives after its request was abandoned must be discarded."""
    pictures = fingerprint.fresh(24)
    asking = asyncio.create_task(check_answers(client, pictures + pictures))
    while not asking.done():
        with frozen(server(stack).pid):
            await asyncio.sleep(0.3)
        await asyncio.sleep(0.05)
    await asking
