"""Requests that are broken, too large, unwanted or left alone, and the gateway's own endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway_svc.bodies import Buffers
from lookonce.errors import OverloadedError
from lookonce.testing import FakeRequest, FakeServer
from tests.gateway_svc.gateways import Gateway, running_gateway

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"
JSON = "content-type: application/json\r\n"


@pytest.fixture
def server() -> Any:
    with FakeServer("a red square") as running:
        yield running


@pytest.fixture
async def gateway(server: FakeServer) -> AsyncIterator[Gateway]:
    async with running_gateway(server.target, max_body_bytes=1_000_000, max_buffered_bytes=2_000_000) as running:
        yield running


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "model": "fake"}',
        b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
        json.dumps({**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}).encode(),
        json.dumps(CHAT).replace("{", '{"temperature": 1e400, ', 1).encode(),
        json.dumps({**CHAT, "seed": 1 << 64}).encode(),
        json.dumps({**CHAT, "n": 16, "messages": CHAT["messages"] * 129}).encode(),
        json.dumps({**CHAT, "n": 16, "messages": [{"role": "user", "content": "x" * 530_000}]}).encode(),
        json.dumps({**CHAT, "logit_bias": {str(index): 1 for index in range(1025)}}).encode(),
        json.dumps({**CHAT, "seed": 1, "top_k": -5}).encode(),
        json.dumps({**CHAT, "messages": [{"role": "user", "content": " "}]}).encode(),
        json.dumps({**CHAT, "max_tokens": 1 << 70}).encode(),
    ],
)
async def test_a_body_that_is_no_request_is_refused(gateway: Gateway, server: FakeServer, body: bytes) -> None:
    status, answer = await gateway.post(PATH, body)
    assert (status, error_of(answer)["type"]) == (400, "invalid_request_error")
    assert not server.requests


async def test_a_body_that_is_too_large_is_refused_before_it_arrives(gateway: Gateway) -> None:
    status, answer = await gateway.post(PATH, b"", {"content-length": "1000001"})
    assert (status, error_of(answer)["code"]) == (413, "MESSAGE_TOO_LARGE")
    chunk = b"f4240\r\n" + b"x" * 1_000_000 + b"\r\n"
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{JSON}transfer-encoding: chunked\r\n\r\n".encode()
    answer = await gateway.raw(head + chunk + b"1\r\nx\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_memory_for_bodies_is_bounded_and_comes_back(gateway: Gateway) -> None:
    """Bodies that never come to an end hold their memory; a third one of this size has no room."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: 900001\r\n\r\n".encode()
    held = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(3)]
    buffers = gateway.endpoints._buffers
    # Bytes that are only announced take no memory from others.
    held[2][1].write(head)
    for _, writer in held[:2]:
        writer.write(head + b"x" * 900_000)
    await until(lambda: buffers.num_bytes == 1_800_000)
    status, answer = await gateway.post(PATH, b"", {"content-length": "900001"})
    assert (status, error_of(answer)["code"]) == (429, "OVERLOADED")
    for _, writer in held:
        writer.close()
    await until(lambda: buffers.num_bytes == 0)
    assert (await gateway.post(PATH, json.dumps(CHAT).encode()))[0] == 200
    assert buffers.num_bytes == 0


async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(gateway: Gateway) -> None:
    status, answer = await gateway.post(PATH, b"[" + b"{}," * 300_000 + b"{}]")
    assert status == 400
    assert "more than 400000 signs" in error_of(answer)["message"]


async def test_errors_do_not_repeat_long_values(gateway: Gateway) -> None:
    for body in ({**CHAT, "model": "m" * 500_000}, {**CHAT, "stop_token_ids": [-1] * 100_000}, {"x" * 500_000: 1}):
        status, answer = await gateway.post(PATH, json.dumps(body).encode())
        assert status in (400, 404)
        assert len(answer) < 2000


def test_a_share_that_was_refused_is_given_back() -> None:
    buffers = Buffers(10)
    with buffers.share() as share, buffers.share() as other:
        share.take(6)
        with pytest.raises(OverloadedError):
            other.take(5)
        other.take(4)
    assert buffers.num_bytes == 0


@pytest.mark.parametrize(
    "key", ["Basic abc", "Bearer", "Bearer  ", "Bearer a b", "Bearer \u00e9", f"Bearer {'x' * 5000}"]
)
async def test_a_key_that_is_none_is_refused(gateway: Gateway, key: str) -> None:
    status, answer = await gateway.post(PATH, json.dumps(CHAT).encode(), {"authorization": key})
    assert (status, error_of(answer)["code"]) == (401, "UNAUTHENTICATED")


async def test_two_keys_are_refused(gateway: Gateway) -> None:
    keys = {"authorization": "Bearer one", "Authorization": "Bearer two"}
    assert (await gateway.post(PATH, json.dumps(CHAT).encode(), keys))[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        "",
        "content-type: text/plain\r\n",
        "content-type: multipart/form-data\r\n",
        "content-type: application/x-www-form-urlencoded\r\n",
        "content-type: application/json\r\ncontent-type: text/plain\r\n",
        "content-type: application/json; charset=latin-1\r\n",
        "content-type: application/json\r\ncontent-encoding: gzip\r\n",
    ],
)
async def test_other_kinds_of_bodies_are_refused(gateway: Gateway, server: FakeServer, headers: str) -> None:
    """A page of another site may make a browser send some of these without asking the server first."""
    body = json.dumps(CHAT)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {len(body)}\r\n\r\n"
    assert (await gateway.raw((head + body).encode())).startswith(b"HTTP/1.1 400 ")
    assert not server.requests


async def test_headers_after_a_body_are_not_taken_for_those_before_it(gateway: Gateway, server: FakeServer) -> None:
    body = json.dumps(CHAT)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{JSON}connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = f"{len(body):x}\r\n{body}\r\n0\r\nauthorization: Bearer smuggled\r\n\r\n"
    assert (await gateway.raw((head + chunks).encode())).startswith(b"HTTP/1.1 200 ")
    assert "authorization" not in server.requests[-1].metadata


async def test_a_second_request_before_the_answer_to_the_first_is_not_answered(gateway: Gateway) -> None:
    body = json.dumps(CHAT)
    one = f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n\r\n{body}"
    answer = await gateway.raw((one + one).encode())
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert b"connection: close" in answer


async def test_requests_on_a_connection_that_was_used_do_not_wait(gateway: Gateway) -> None:
    """Without TCP_NODELAY on the server's side, each took 40 ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readline()
    (connection,) = gateway.server.server_state.connections
    opened = connection.transport.get_extra_info("socket")
    assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("GET /v1/chat/completions", 405), ("GET /v1/engines", 404), ("POST /health", 405), ("GET /../etc/passwd", 404)],
)
async def test_other_paths_and_methods(gateway: Gateway, request_line: str, status: int) -> None:
    answer = await gateway.raw(f"{request_line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    error_of(answer.partition(b"\r\n\r\n")[2])


async def test_a_request_has_the_id_that_its_caller_gives_it(gateway: Gateway, server: FakeServer) -> None:
    for offered, is_taken in (("mine-1", True), ("no id", False), ("x" * 129, False)):
        request = f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{JSON}connection: close\r\nx-request-id: {offered}\r\n"
        body = json.dumps(CHAT)
        answer = await gateway.raw(f"{request}content-length: {len(body)}\r\n\r\n{body}".encode())
        head = answer.partition(b"\r\n\r\n")[0].decode()
        (found,) = [line.partition(": ")[2] for line in head.splitlines() if line.lower().startswith("x-request-id")]
        assert (found == offered) == is_taken
        assert server.requests[-1].request_id == found


@pytest.mark.parametrize("after", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_goes_ends_its_call(streams: bool, after: bytes) -> None:
    """A further request on the connection kept the gateway from reading, and so from seeing the end."""
    begun, ended = threading.Event(), threading.Event()

    def answer(request: FakeRequest) -> str:
        begun.set()
        ended.wait(60)
        return "late"

    with FakeServer(answer) as server:
        async with running_gateway(server.target) as gateway:
            body = json.dumps({**CHAT, "stream": streams}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(
                f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n\r\n".encode() + body + after
            )
            await until(begun.is_set)
            writer.close()
            labels = {"path": PATH, "status": "499"}
            await until(lambda: gateway.registry.get_sample_value("lookonce_gateway_requests_total", labels) == 1.0)
            assert gateway.registry.get_sample_value("lookonce_gateway_requests_in_flight") == 0.0
            assert gateway.endpoints._buffers.num_bytes == 0
            ended.set()


async def test_health_follows_the_decoder_and_the_drain(gateway: Gateway, server: FakeServer) -> None:
    async def status() -> int:
        answer = await gateway.raw(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return int(answer.split(b" ")[1])

    assert await status() == 200
    gateway.endpoints.is_draining = True
    assert await status() == 503
    gateway.endpoints.is_draining = False
    server.close()
    # The gateway hears that its connection is closed some moments later.
    async with asyncio.timeout(60):
        while await status() != 503:
            await asyncio.sleep(0.01)


async def test_metrics_count_paths_that_callers_choose_together(gateway: Gateway) -> None:
    for name in ("a", "b"):
        await gateway.raw(f"GET /{name} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    labels = {"path": "other", "status": "404"}
    await until(lambda: gateway.registry.get_sample_value("lookonce_gateway_requests_total", labels) == 2.0)


async def test_a_large_head_ends_its_connection(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"x" * 10_000) for n in range(100)))
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
