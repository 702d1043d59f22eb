"""Behaviour of AsyncClient that the synchronous client does not have: lazy streams, cancelled tasks, concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import lookonce
from tests.lookonce.sdk.sdk_servers import System, running_system


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as started:
        yield started


@pytest.fixture
async def client(system: System) -> AsyncIterator[lookonce.AsyncClient]:
    async with lookonce.AsyncClient.connect(system.decoder_target) as connected:
        yield connected


async def _settled(system: System, num_ended: int) -> None:
    async with asyncio.timeout(20):
        while system.decoder.ended_streams < num_ended:
            await asyncio.sleep(0.01)


async def test_a_stream_sends_its_request_when_the_iteration_starts(
    client: lookonce.AsyncClient, system: System
) -> None:
    stream = client.stream("one two")
    assert (await client.model_info()).model == "echo"
    assert system.knowledge.count("GenerateStream") == 0
    assert [piece async for piece in stream] == ["one", " two", " +0"]
    assert system.knowledge.count("GenerateStream") == 1


async def test_a_stream_that_was_never_iterated_can_be_closed(client: lookonce.AsyncClient, system: System) -> None:
    async with client.stream("one two"):
        pass
    assert system.knowledge.count("GenerateStream") == 0


async def test_cancelling_a_reader_ends_the_request_on_the_server(client: lookonce.AsyncClient, system: System) -> None:
    system.decoder.delay_s = 600.0
    started = asyncio.Event()

    async def read() -> None:
        started.set()
        await anext(client.stream("one two"))

    reader = asyncio.create_task(read())
    await started.wait()
    async with asyncio.timeout(20):
        while not system.knowledge.count("GenerateStream"):
            await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await _settled(system, 1)


async def test_calls_of_one_client_run_at_the_same_time(client: lookonce.AsyncClient) -> None:
    generations = await asyncio.gather(*(client.generate(f"number {number}") for number in range(20)))
    assert [generation.text for generation in generations] == [f"number {number} +0" for number in range(20)]
