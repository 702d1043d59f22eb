"""Tests that connections without a request make room for others, and that those with one do not."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gateway_svc.connection_limit import ConnectionLimit
from lookonce.testing import FakeServer
from tests.gateway_svc.gateways import KEY, Gateway, running_gateway

PATH = "/v1/chat/completions"
BODY = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hello"}]}).encode()
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """The event that lets the stand-in answer."""
    event = threading.Event()
    yield event
    event.set()


async def connected(gateway: Gateway, sent: bytes = b"") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


def request() -> bytes:
    head = (
        f"host: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n"
    )
    return f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + BODY


async def until_ended(connection: Connection) -> bytes:
    """Returns what comes until the gateway closes a connection."""
    try:
        return await asyncio.wait_for(connection[0].read(), 60)
    except ConnectionError:
        return b""


async def until_open(gateway: Gateway, number: int) -> None:
    while len(gateway.server.server_state.connections) != number:
        await asyncio.sleep(0.005)


async def test_the_connection_that_waited_longest_makes_room() -> None:
    with FakeServer("word") as server:
        async with running_gateway(server.target, max_connections=3) as gateway:
            silent = await connected(gateway)
            await until_open(gateway, 1)
            half = await connected(gateway, request()[:-5])
            await until_open(gateway, 2)
            idle = await connected(gateway, request())
            assert b" 200 " in await idle[0].readuntil(b"\r\n")
            another = await connected(gateway, request())
            assert b" 200 " in await another[0].readuntil(b"\r\n")
            assert await until_ended(silent) == b""
            last = await connected(gateway, request())
            assert b" 200 " in await last[0].readuntil(b"\r\n")
            assert await until_ended(half) == b""
            new = await connected(gateway, request())
            assert b" 200 " in await new[0].readuntil(b"\r\n")
            await until_ended(idle)
            await until_open(gateway, 3)
            for _, writer in (silent, half, idle, another, last, new):
                writer.close()


async def test_answers_in_progress_are_not_ended(held: threading.Event) -> None:
    def answer(_: object) -> str:
        held.wait()
        return "word"

    with FakeServer(answer) as server:
        try:
            async with running_gateway(server.target, max_connections=2) as gateway:
                asking = [await connected(gateway, request()) for _ in range(2)]
                await until_open(gateway, 2)
                while len(server.requests) < 2:
                    await asyncio.sleep(0.005)
                refused = await connected(gateway, request())
                assert await until_ended(refused) == b""
                held.set()
                for reader, _ in asking:
                    assert b" 200 " in await reader.readuntil(b"\r\n")
                for _, writer in (*asking, refused):
                    writer.close()
        finally:
            held.set()


async def test_a_thousand_silent_connections_do_not_shut_others_out() -> None:
    with FakeServer("word") as server:
        async with running_gateway(server.target, max_connections=50) as gateway:
            silent = [await connected(gateway) for _ in range(1000)]
            status, _ = await gateway.post(PATH, BODY, {"authorization": f"Bearer {KEY}"})
            assert status == 200
            await until_open(gateway, 49)
            for _, writer in silent:
                writer.close()


class Noted:
    """A connection that notes its end."""

    def __init__(self) -> None:
        self.is_ended = False

    def end(self) -> None:
        assert not self.is_ended
        self.is_ended = True


@pytest.mark.parametrize("seed", range(20))
def test_random_connections_are_those_of_a_list(seed: int) -> None:
    rng = random.Random(seed)
    limit = ConnectionLimit(5)
    # Second implementation: all open connections with the time since which they wait; None: one works.
    since: dict[Noted, int | None] = {}
    for time in range(2000):
        choice = rng.random()
        if choice < 0.4 or not since:
            new = Noted()
            since[new] = time
            limit.opened(new)
            if len(since) > 5:
                waiting = [one for one in since if since[one] is not None]
                longest = min(waiting, key=lambda one: since[one] or 0)
                assert [one for one in since if one.is_ended] == [longest]
                limit.closed(longest)
                del since[longest]
            continue
        one = rng.choice(list(since))
        assert not one.is_ended
        if choice < 0.6:
            limit.closed(one)
            del since[one]
        elif since[one] is None:
            limit.waits(one)
            since[one] = time
        else:
            limit.works(one)
            since[one] = None


@pytest.mark.parametrize(("files", "allowed"), [(600, 88), (100_000, 4096), (4608, 4096)])
def test_the_limit_follows_that_of_open_files(files: int, allowed: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        files, allowed = hard, max(1, min(4096, hard - 512))
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {files})); "
        "from gateway_svc.connection_limit import allowed_connections; print(allowed_connections())"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert process.stdout.split() == [str(allowed)], process.stderr
