"""Both clients balance calls over replicas and send none to a replica that reports NOT_SERVING."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

import lookonce
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_grpc
from lookonce.images import ImageRef
from tests.lookonce.sdk.sdk_servers import EchoDecoder, Knowledge, System, running_system

CONNECT = [lookonce.Client.connect, lookonce.AsyncClient.connect]
# Two replicas that serve get about half of them each.
NUM_CALLS = 10
TIMEOUT_S = 60


async def ask(client: Any, method: str, *arguments: Any) -> Any:
    """Makes the same call with either client."""
    called = getattr(client, method)
    if isinstance(client, lookonce.AsyncClient):
        return await called(*arguments)
    return await asyncio.to_thread(called, *arguments)


async def close(client: Any) -> None:
    if isinstance(client, lookonce.AsyncClient):
        await client.aclose()
    else:
        client.close()


async def calls_of(client: Any, system: System) -> tuple[int, int]:
    """Counts the calls that this system's decoder and encoder received."""
    before = system.knowledge.count("Generate"), system.knowledge.count("LookupEmbeddings")
    for number in range(NUM_CALLS):
        # Equal questions go to one of them.
        await ask(client, "generate", f"hello {number}")
        await ask(client, "lookup", [ImageRef.from_bytes(b"picture")])
    after = system.knowledge.count("Generate"), system.knowledge.count("LookupEmbeddings")
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("connect", CONNECT, ids=["sync", "async"])
async def test_a_replica_that_is_not_serving_gets_no_calls_until_it_serves(connect: Any) -> None:
    is_ready = False
    async with running_system() as well, running_system(is_ready=lambda: is_ready) as other:
        client = connect(
            f"ipv4:{well.decoder_target},{other.decoder_target}", f"ipv4:{well.encoder_target},{other.encoder_target}"
        )
        assert await calls_of(client, other) == (0, 0)
        async with asyncio.timeout(TIMEOUT_S):
            is_ready = True
            while not all(await calls_of(client, other)):
                pass
            is_ready = False
            while any(await calls_of(client, other)):
                pass
        await close(client)


@pytest.mark.parametrize("connect", CONNECT, ids=["sync", "async"])
async def test_a_server_that_knows_nothing_of_health_is_called(connect: Any) -> None:
    """A gateway between client and servers may have no health service."""
    server = grpc.aio.server()
    decoder_grpc.add_DecoderServiceServicer_to_server(EchoDecoder(Knowledge()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = connect(f"127.0.0.1:{port}")
    assert (await ask(client, "generate", "hello")).text == "hello +0"
    await close(client)
    await server.stop(None)
