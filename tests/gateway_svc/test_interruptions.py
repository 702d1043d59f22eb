"""Calls end when no decoder serves, when the gateway ends, and when their client takes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway_svc import http_connection, interruptions
from lookonce.testing import FakeRequest, FakeServer
from tests.gateway_svc.gateways import Gateway, running_gateway

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


def make_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the gateway give up soon. Called once a decoder has gone: on a busy machine one that serves seems late."""
    for name, seconds in {"_LOOK_S": 0.05, "_WAIT_S": 0.2, "_LOST_S": 0.5}.items():
        monkeypatch.setattr(interruptions, name, seconds)


@pytest.fixture
def held() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Events for the beginning of an answer, and for its end."""
    begun, may_end = threading.Event(), threading.Event()
    yield begun, may_end
    may_end.set()


async def until(condition: Any, asking: asyncio.Task[Any] | None = None) -> None:
    """Waits until something is so. Fails at once if a call that must wait for it has ended."""
    async with asyncio.timeout(60):
        while not condition():
            assert asking is None or not asking.done(), asking
            await asyncio.sleep(0.01)


def error_of(answer: tuple[int, bytes]) -> tuple[int, str, str]:
    error = json.loads(answer[1])["error"]
    return answer[0], error["code"], error["message"]


@contextlib.contextmanager
def without_listener(target: str) -> Iterator[None]:
    """Keeps the address of a server that has ended: the next test that needs a free port might get it."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, port = target.rsplit(":", 1)
        bound.bind((host, int(port)))
        yield


async def test_without_a_decoder_calls_are_unavailable_soon_and_the_address_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hung for ten minutes, and then told where the decoder had been."""
    with FakeServer() as server:
        target = server.target
        async with running_gateway(target) as gateway:
            assert (await gateway.post(PATH, json.dumps(CHAT).encode()))[0] == 200
            server.close()
            with without_listener(target):
                make_hasty(monkeypatch)
                # The last look with the longer times ends meanwhile.
                await asyncio.sleep(2.5)
                expected = (503, "UNAVAILABLE", "no decoder serves at the moment; try again later")
                assert error_of(await gateway.post(PATH, json.dumps(CHAT).encode())) == expected
                models = await gateway.raw(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert models.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 5" in models


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_whose_decoder_is_gone_ends(
    streams: bool, held: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = held

    def answer(request: FakeRequest) -> str:
        begun.set()
        may_end.wait(60)
        return "late"

    with FakeServer(answer) as server:
        async with running_gateway(server.target) as gateway:
            asking = asyncio.create_task(gateway.post(PATH, json.dumps({**CHAT, "stream": streams}).encode()))
            await until(begun.is_set, asking)
            make_hasty(monkeypatch)
            closing = asyncio.create_task(asyncio.to_thread(server.close))
            status, code, message = error_of(await asking)
            may_end.set()
            await closing
            assert (status, code) == (503, "UNAVAILABLE")
            assert message in (
                "no decoder serves at the moment; try again later",
                "no decoder could answer; try again later",
            )


@pytest.mark.parametrize("streams", [False, True])
async def test_calls_that_a_drain_cuts_get_an_answer(
    streams: bool, held: tuple[threading.Event, threading.Event]
) -> None:
    begun, may_end = held

    def answer(request: FakeRequest) -> str:
        begun.set()
        may_end.wait(60)
        return "late"

    with FakeServer(answer) as server:
        async with running_gateway(server.target) as gateway:
            asking = asyncio.create_task(gateway.post(PATH, json.dumps({**CHAT, "stream": streams}).encode()))
            await until(begun.is_set, asking)
            gateway.endpoints.end_calls()
            assert error_of(await asking) == (503, "UNAVAILABLE", "the gateway ends; try another one")
            may_end.set()


async def test_a_client_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_STUCK_S", 0.2)
    with FakeServer("word " * 2_000_000) as server:
        async with running_gateway(server.target) as gateway:
            body = json.dumps(CHAT).encode()
            head = (
                f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(head.encode() + b"\r\n" + body)
            await until(lambda: any(_waiting(gateway)))
            await until(lambda: not gateway.server.server_state.connections)
            writer.close()
            assert reader.exception() is None


def _waiting(gateway: Gateway) -> list[int]:
    return [one.transport.get_write_buffer_size() for one in gateway.server.server_state.connections]
