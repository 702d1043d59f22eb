"""The end of a client: its calls and streams end, on the server too, and later calls get one error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

import lookonce
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import AbortedError
from tests.lookonce.sdk.sdk_servers import System, running_system, stream_of

CLOSED = "the client is closed"


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as started:
        yield started


async def ended_streams(system: System, expected: int) -> None:
    async with asyncio.timeout(10):
        while system.decoder.ended_streams < expected:
            await asyncio.sleep(0.01)


async def asked(system: System, method: str) -> None:
    async with asyncio.timeout(10):
        while not system.knowledge.count(method):
            await asyncio.sleep(0.01)


async def test_closing_the_client_of_asyncio_ends_half_read_streams(system: System) -> None:
    system.decoder.events = stream_of(["word"] * 100_000, decoder_pb2.Usage())
    client = lookonce.AsyncClient.connect(system.decoder_target)
    streams = [client.stream("x") for _ in range(3)]
    for stream in streams[:2]:
        assert await anext(stream) == "word"
    await client.aclose()
    await ended_streams(system, 2)
    for stream in streams:
        with pytest.raises(AbortedError, match=CLOSED):
            [piece async for piece in stream]
    assert system.knowledge.count("GenerateStream") == 2


async def test_closing_the_synchronous_client_ends_half_read_streams(system: System) -> None:
    system.decoder.events = stream_of(["word"] * 100_000, decoder_pb2.Usage())
    client = lookonce.Client.connect(system.decoder_target)
    stream = await asyncio.to_thread(client.stream, "x")
    assert await asyncio.to_thread(next, stream) == "word"
    await asyncio.to_thread(client.close)
    await ended_streams(system, 1)
    with pytest.raises(AbortedError, match=CLOSED):
        await asyncio.to_thread(list, stream)


async def test_a_task_that_waits_when_the_client_is_closed_gets_the_error_and_is_not_cancelled(system: System) -> None:
    system.decoder.delay_s = 600.0
    client = lookonce.AsyncClient.connect(system.decoder_target)

    async def read() -> None:
        async for _ in client.stream("x"):
            pass

    for method, work in (("Generate", client.generate("x")), ("GenerateStream", read())):
        task = asyncio.create_task(work)
        await asked(system, method)
        if method == "GenerateStream":
            await client.aclose()
            with pytest.raises(AbortedError, match=CLOSED):
                await task
        else:
            # A caller's own cancellation stays one.
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_single_call_in_flight_ends_with_the_client(system: System) -> None:
    system.decoder.delay_s = 600.0
    client = lookonce.AsyncClient.connect(system.decoder_target)
    task = asyncio.create_task(client.generate("x"))
    await asked(system, "Generate")
    await client.aclose()
    with pytest.raises(AbortedError, match=CLOSED):
        await task


async def test_a_timeout_of_asyncio_beside_the_close_stays_a_timeout(system: System) -> None:
    system.decoder.delay_s = 600.0
    client = lookonce.AsyncClient.connect(system.decoder_target)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await client.generate("x")
    await client.aclose()


async def test_a_synchronous_call_in_flight_ends_with_the_client(system: System) -> None:
    system.decoder.delay_s = 600.0
    client = lookonce.Client.connect(system.decoder_target)
    waiting = asyncio.create_task(asyncio.to_thread(client.generate, "x"))
    await asked(system, "Generate")
    await asyncio.to_thread(client.close)
    with pytest.raises(AbortedError, match=CLOSED):
        await waiting


CALLS: list[tuple[str, Any]] = [("generate", "x"), ("encode", [b"x"]), ("lookup", [b"x"])]


@pytest.mark.parametrize("knows_encoder", [False, True])
async def test_every_call_of_a_closed_synchronous_client_is_refused(system: System, knows_encoder: bool) -> None:
    client = lookonce.Client.connect(system.decoder_target, system.encoder_target if knows_encoder else None)
    await asyncio.to_thread(client.model_info)
    client.close()
    client.close()
    for method, argument in [*CALLS, ("stream", "x")]:
        with pytest.raises(AbortedError, match=CLOSED):
            await asyncio.to_thread(getattr(client, method), argument)
    assert len(system.knowledge.calls) == 1


@pytest.mark.parametrize("knows_encoder", [False, True])
async def test_every_call_of_a_closed_client_of_asyncio_is_refused(system: System, knows_encoder: bool) -> None:
    client = lookonce.AsyncClient.connect(system.decoder_target, system.encoder_target if knows_encoder else None)
    await client.model_info()
    await client.aclose()
    await client.aclose()
    for method, argument in CALLS:
        with pytest.raises(AbortedError, match=CLOSED):
            await getattr(client, method)(argument)
    with pytest.raises(AbortedError, match=CLOSED):
        await anext(client.stream("x"))
    assert len(system.knowledge.calls) == 1


async def test_closed_clients_of_operators_refuse_every_call() -> None:
    sync = lookonce.AdminClient.connect("127.0.0.1:1")
    sync.close()
    with pytest.raises(AbortedError, match=CLOSED):
        sync.stats()
    client = lookonce.AsyncAdminClient.connect("127.0.0.1:1")
    await client.aclose()
    with pytest.raises(AbortedError, match=CLOSED):
        await client.evict([b"x"])


async def test_a_stream_that_was_closed_before_its_client_ends_quietly(system: System) -> None:
    client = lookonce.AsyncClient.connect(system.decoder_target)
    stream = client.stream("one two")
    assert await anext(stream) == "one"
    await stream.aclose()
    await client.aclose()
    with contextlib.suppress(StopAsyncIteration):
        await anext(stream)
    await ended_streams(system, 1)
