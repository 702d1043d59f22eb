"""A picture that many calls of one client need at once is sent once, and no call waits for it in vain."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lookonce
from lookonce.errors import DeadlineError, EmbeddingNotCachedError, InternalError
from lookonce.sdk.uploads import Uploads
from tests.lookonce.sdk.sdk_servers import System, running_system

NUM_CALLS = 30
# Large enough to be sent by digest first.
PICTURE = random.Random("uploads").randbytes(300_000)
OTHER = random.Random("another").randbytes(300_000)


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as running:
        yield running


async def test_tasks_that_ask_about_one_picture_send_it_once(system: System) -> None:
    async with lookonce.AsyncClient.connect(system.decoder_target) as client:
        answers = await asyncio.gather(*(client.generate(f"q{n}", [PICTURE]) for n in range(NUM_CALLS)))
        assert [answer.text.split()[0] for answer in answers] == [f"q{n}" for n in range(NUM_CALLS)]
        assert system.knowledge.uploads == [len(PICTURE)]


async def test_streams_and_tokenize_share_uploads_with_generate(system: System) -> None:
    async def read(client: lookonce.AsyncClient) -> str:
        async with client.stream("hello", [PICTURE]) as stream:
            return "".join([piece async for piece in stream])

    async with lookonce.AsyncClient.connect(system.decoder_target) as client:
        other = client.with_options(timeout_s=30.0)
        calls: list[Any] = [read(client), read(other), client.generate("hello", [PICTURE])]
        await asyncio.gather(*calls, *(other.generate("hello", [PICTURE]) for _ in range(5)))
        assert system.knowledge.uploads == [len(PICTURE)]


async def test_threads_that_ask_about_one_picture_send_it_once(system: System) -> None:
    def ask() -> list[str]:
        with (
            lookonce.Client.connect(system.decoder_target) as client,
            ThreadPoolExecutor(NUM_CALLS) as threads,
        ):
            begin = threading.Barrier(NUM_CALLS)

            def one(number: int) -> str:
                begin.wait(30.0)
                if number % 2:
                    return client.generate("hello", [PICTURE]).text
                return "".join(client.stream("hello", [PICTURE]))

            return list(threads.map(one, range(NUM_CALLS)))

    assert set(await asyncio.to_thread(ask)) == {"hello +1"}
    assert system.knowledge.uploads == [len(PICTURE)]


async def test_others_send_the_picture_when_the_first_call_fails_or_is_cancelled(system: System) -> None:
    async with lookonce.AsyncClient.connect(system.decoder_target, max_retries=0) as client:
        await client.generate("warm")
        system.decoder.failures = [InternalError("broken")]
        found = await asyncio.gather(
            *(client.generate("hello", [PICTURE]) for _ in range(NUM_CALLS)), return_exceptions=True
        )
        assert sum(isinstance(one, InternalError) for one in found) == 1
        assert sum(isinstance(one, lookonce.Generation) for one in found) == NUM_CALLS - 1
        assert not client._connection.uploads._senders

        calls = [asyncio.create_task(client.generate("hello", [OTHER])) for _ in range(5)]
        await asyncio.sleep(0.01)
        calls[0].cancel()
        assert len([one for one in await asyncio.gather(*calls, return_exceptions=True) if one]) == 5
        assert not client._connection.uploads._senders


async def test_an_abandoned_stream_keeps_nobody_waiting(system: System) -> None:
    async with lookonce.AsyncClient.connect(system.decoder_target) as client:
        stream = client.stream("a b c", [PICTURE])
        await anext(stream)
        assert not client._connection.uploads._senders
        await stream.aclose()
        unread = client.stream("a b c", [OTHER])
        assert (await client.generate("hello", [OTHER], timeout_s=2.0)).text == "hello +1"
        del unread


async def test_a_digest_alone_is_still_an_error_at_once(system: System) -> None:
    async with lookonce.AsyncClient.connect(system.decoder_target) as client:
        with pytest.raises(EmbeddingNotCachedError):
            await client.generate("hello", [lookonce.ImageRef.from_digest(lookonce.ImageRef.from_bytes(OTHER).digest)])


async def test_a_server_that_forgets_at_once_gets_the_picture_once_from_each_call(system: System) -> None:
    class Forgetful(set[Any]):
        def update(self, *_: Any) -> None:
            pass

    system.knowledge.cached = Forgetful()
    async with lookonce.AsyncClient.connect(system.decoder_target) as client:
        with pytest.raises(EmbeddingNotCachedError):
            await client.generate("hello", [PICTURE])
        assert system.knowledge.uploads == [len(PICTURE)]


async def test_the_wait_ends_at_the_deadline(system: System) -> None:
    async with lookonce.AsyncClient.connect(system.decoder_target) as client:
        # A call that sends the picture and never ends.
        with client._connection.uploads.turn() as turn:
            assert turn.pause_s([lookonce.ImageRef.from_bytes(PICTURE).digest]) is None
            with pytest.raises(DeadlineError):
                await client.generate("hello", [PICTURE], timeout_s=0.4)
            assert not system.knowledge.uploads


def test_turns() -> None:
    now_s = 100.0
    uploads = Uploads(lambda: now_s)
    first, second, third = uploads.turn(), uploads.turn(), uploads.turn()
    now_s += 0.001
    assert first.pause_s([b"a", b"b"]) is None
    assert [second.pause_s([b"b", b"c"]) for _ in range(5)] == [0.05, 0.1, 0.2, 0.4, 0.4]
    # It has taken nothing while it waits.
    assert third.pause_s([b"c"]) is None
    now_s += 1.0
    first.end()
    third.end()
    now_s += 0.001
    # The server was asked before the others had sent them.
    assert second.pause_s([b"b"]) == 0.4
    now_s += 0.401
    assert second.pause_s([b"b"]) is None
    # One that waits for too long sends by itself, and takes nothing from the first sender.
    fourth, fifth = uploads.turn(), uploads.turn()
    assert fourth.pause_s([b"b"]) == 0.05
    now_s += 2.9
    assert fourth.pause_s([b"b"]) == 0.1
    now_s += 0.2
    assert fourth.pause_s([b"b"]) is None
    fourth.end()
    assert fifth.pause_s([b"b"]) == 0.05
    second.end()
    assert not uploads._senders


def test_few_images_are_remembered() -> None:
    uploads = Uploads()
    for number in range(1000):
        with uploads.turn() as turn:
            assert turn.pause_s([b"%d" % number]) is None
    assert list(uploads._sent_s) == [("", b"%d" % number) for number in range(744, 1000)]
