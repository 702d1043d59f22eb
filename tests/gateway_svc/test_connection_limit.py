"""Tests that connections without a request make room for others, and that those with one do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import trustme

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
    for now in range(2000):
        choice = rng.random()
        if choice < 0.4 or not since:
            with socket.socket() as accepted:
                limit.accepted(accepted)
                file = accepted.fileno()
                if len(since) == 5:
                    waiting = [one for one in since if since[one] is not None]
                    longest = min(waiting, key=lambda one: since[one] or 0, default=None)
                    assert [one for one in since if one.is_ended] == ([] if longest is None else [longest])
                    if longest is None:
                        # All work: the new one was ended, and its handshake fails.
                        continue
                    limit.closed(longest)
                    del since[longest]
                if rng.random() < 0.3:
                    # Its client has gone before the handshake was over.
                    continue
                new = Noted()
                since[new] = now
                limit.opened(new, file)
            continue
        one = rng.choice(list(since))
        assert not one.is_ended
        if choice < 0.6:
            limit.closed(one)
            del since[one]
        elif since[one] is None:
            limit.waits(one)
            since[one] = now
        else:
            limit.works(one)
            since[one] = None
    limit._forget_failed()
    assert limit._num_open == len(since)


@pytest.mark.parametrize(
    ("files", "has_tls", "allowed"),
    [(600, False, 344), (100_000, False, 4096), (100_000, True, 1024), (600, True, 344)],
)
def test_the_limit_follows_that_of_open_files(files: int, has_tls: bool, allowed: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        # This machine allows fewer.
        files, allowed = hard, min(allowed, hard - 256)
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {files})); "
        "from gateway_svc.connection_limit import allowed_connections; "
        f"print(allowed_connections(has_tls={has_tls}))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert process.stdout.split() == [str(allowed)], process.stderr


def test_a_gateway_with_too_few_files_does_not_start() -> None:
    command = f"ulimit -n 300; exec {sys.executable} -m gateway_svc --decoder-target 127.0.0.1:1 --listen 127.0.0.1:0"
    process = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert process.returncode == 2
    assert "may open 300 files, and a gateway needs at least 320" in process.stderr


async def test_a_request_that_was_answered_before_its_body_came_does_not_count_as_being_answered() -> None:
    """Anybody could hold all places so, and everyone else was turned away."""
    head = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
    with FakeServer("word") as server:
        async with running_gateway(server.target, max_connections=4) as gateway:
            held = [await connected(gateway, head) for _ in range(4)]
            for reader, writer in held:
                assert b" 404 " in await reader.readuntil(b"\r\n")
                writer.write(b"12345")
                await writer.drain()
            for _ in range(3):
                status, _ = await gateway.post(PATH, BODY, {"authorization": f"Bearer {KEY}"})
                assert status == 200
            for _, writer in held:
                writer.close()


async def test_connections_without_a_tls_handshake_make_room_and_their_files_are_given_back(
    tmp_path: pathlib.Path,
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with FakeServer("word") as server:
        settings = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
        async with running_gateway(server.target, max_connections=20, **settings) as gateway:
            silent = [await connected(gateway) for _ in range(200)]
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trusting)
                writer.write(request())
                assert b" 200 " in await reader.readuntil(b"\r\n")
                writer.close()
            for _, writer in silent:
                writer.close()
            assert gateway.limit._num_open <= 23


def test_a_process_without_files_closes_those_that_wait(tmp_path: pathlib.Path) -> None:
    """It wrote thousands of lines each second, and answered nobody."""
    log, ready = tmp_path / "log", tmp_path / "ready.json"
    program = (
        "import sys; from gateway_svc import connection_limit; connection_limit._RESERVED_FILES = -200; "
        "from gateway_svc.__main__ import main; main()"
    )
    with FakeServer("word") as server, log.open("w") as file, contextlib.ExitStack() as opened:
        flags = f"--decoder-target {server.target} --listen 127.0.0.1:0 --ready-file {ready}"
        command = f"ulimit -n 150; exec {sys.executable} -c '{program}' {flags}"
        process = opened.enter_context(subprocess.Popen(["sh", "-c", command], stderr=file))
        opened.callback(process.terminate)
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        port = int(json.loads(ready.read_text())["target"].rpartition(":")[2])
        for _ in range(300):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        asking = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        asking.sendall(request())
        assert b" 200 " in asking.recv(1000)
    assert log.read_text().count("out of system resource") < 10
