"""A drain waits for calls that the service works on, and not for those whose clients have stopped."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from lookonce import errors, status_codes
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.server.admission import inflight_calls
from lookonce.server.admission.send_queues import SendQueues
from lookonce.server.settings import MIB
from tests.lookonce.server import raw_calls
from tests.lookonce.server.running_server import KINDS, PART_BYTES, rpc_failure, running_server, until
from tests.lookonce.server.silent_clients import silent_client

# gRPC's frame of a message begins with five bytes.
NOTHING, A_PART = 0, 105
REASON = b"the server is shutting down; retry on another replica"


def status(code: str) -> bytes:
    """Returns a status as gRPC writes it into the trailers."""
    return b"grpc-status" + bytes([len(code)]) + code.encode()


@pytest.mark.parametrize(
    ("method", "num_sent"),
    [
        ("Flood", None),
        ("Large", None),
        ("UnaryUnary", NOTHING),
        ("UnaryStream", A_PART),
        ("StreamStream", NOTHING),
        ("StreamUnary", A_PART),
    ],
)
async def test_a_call_whose_client_has_stopped_does_not_hold_the_drain(
    method: str, num_sent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight_calls, "STALL_S", 0.5)
    async with (
        running_server(drain_timeout_s=600) as running,
        silent_client(running.service.target, f"/{KINDS}/{method}", num_sent=num_sent) as headers,
    ):
        # A call whose client reads is finished, however long it takes.
        working = running.encoder.ReadEmbedding(pb.ReadEmbeddingRequest())
        await working.read()
        async with asyncio.timeout(30):
            stopping = asyncio.create_task(running.service.stop())
            done, _ = await asyncio.wait({stopping}, timeout=2.0)
            assert not done
            working.cancel()
            await stopping
            trailers = await headers
    assert status("14") in trailers
    # No status overtakes an answer that the client does not take. gRPC ends such a call itself.
    assert (REASON in trailers) == (num_sent is not None)


async def test_a_stream_whose_client_keeps_it_open_holds_the_drain_while_the_service_works_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its last answer it waits for its client. The item takes longer than a client may."""
    monkeypatch.setattr(inflight_calls, "STALL_S", 1.0)
    async with running_server(drain_timeout_s=600) as running:
        gate = asyncio.Event()
        running.servicer.stream_gate = gate
        more = asyncio.Event()

        async def one_item_and_then_silence() -> AsyncIterator[pb.EncodeStreamRequest]:
            yield pb.EncodeStreamRequest(item_id="a")
            await more.wait()

        stream: Any = running.encoder.EncodeStream(one_item_and_then_silence(), timeout=60)
        await running.servicer.stream_begun.wait()
        async with asyncio.timeout(30):
            stopping = asyncio.create_task(running.service.stop())
            done, _ = await asyncio.wait({stopping}, timeout=3.0)
            assert not done, "the service works on the item"
            gate.set()
            assert (await stream.read()).item_id == "a"
            failure = await rpc_failure(stream.read())
            await stopping
        more.set()
    assert isinstance(status_codes.from_rpc_error(failure), errors.UnavailableError)
    assert "shutting down" in str(failure.details())


@contextmanager
def talking(connection: socket.socket) -> Iterator[None]:
    """Sends small updates of the window, as clients do all the time, until the server takes no more."""
    is_over = threading.Event()

    def talk() -> None:
        with suppress(OSError):
            while not is_over.wait(0.01):
                connection.sendall(raw_calls.window_update(1))

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("method", ["Part", "Parts"])
async def test_a_client_that_pauses_gets_all_of_an_answer_that_the_kernel_holds(method: str) -> None:
    async with running_server(drain_timeout_s=600) as running:
        queues = SendQueues()
        queues.add_port(int(running.service.target.rpartition(":")[2]))
        connection = await asyncio.to_thread(raw_calls.connect, running.service.target, kernel_bytes=4096)
        with connection, talking(connection):
            connection.sendall(raw_calls.call(1, f"/{KINDS}/{method}"))
            await asyncio.wait_for(running.gate.reached.wait(), 60)
            stopping = asyncio.create_task(running.service.stop())
            await asyncio.to_thread(raw_calls.wait_until_told_to_go, connection)
            running.gate.open()
            await until(queues.look)
            # Long enough for gRPC to close the connection.
            done, _ = await asyncio.wait({stopping}, timeout=1.0)
            assert not done
            headers, num_bytes = await asyncio.to_thread(raw_calls.read_answers, connection)
            await stopping
    assert status("0") in headers
    assert num_bytes > PART_BYTES


async def test_a_slow_client_gets_all_of_an_answer_that_takes_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inflight_calls, "STALL_S", 2.0)
    async with running_server(drain_timeout_s=600) as running:
        # The kernel ends connections whose client holds less than a packet, which has 64 KiB here.
        connection = await asyncio.to_thread(
            raw_calls.connect, running.service.target, window_bytes=2 * MIB, kernel_bytes=100_000
        )
        with connection, talking(connection):
            connection.sendall(raw_calls.window_update(2 * MIB) + raw_calls.call(1, f"/{KINDS}/Parts"))
            await asyncio.wait_for(running.gate.reached.wait(), 60)
            stopping = asyncio.create_task(running.service.stop())
            await asyncio.to_thread(raw_calls.wait_until_told_to_go, connection)
            running.num_parts = 25
            running.gate.open()
            headers, num_bytes = await asyncio.to_thread(raw_calls.read_answers, connection, pause_s=0.05)
            await stopping
    assert status("0") in headers
    assert num_bytes > 25 * PART_BYTES
