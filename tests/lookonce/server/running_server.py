"""A real server on loopback whose handlers raise the errors that a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.serving import GrpcService
from lookonce.server.settings import MIB, ServiceSettings
from lookonce.server.telemetry import Telemetry
from tests.lookonce.server.serving_program import UnsupportedEncoder

ENCODER = "lookonce.encoder.v1.EncoderService"
KINDS = "lookonce.test.v1.Kinds"
# Less than HTTP/2's first window, and than what the kernel takes of an answer at once.
PART_BYTES = 60_000
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]


class RaisingEncoder(UnsupportedEncoder):
    """GetEncoderInfo raises `error` if it is set, and waits for `gathering`; Encode answers one result per item."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.gathering: asyncio.Barrier | None = None
        self.closed_generators = 0
        # EncodeStream answers no item before the gate opens.
        self.stream_begun, self.stream_gate = asyncio.Event(), asyncio.Event()

    async def GetEncoderInfo(self, request: pb.GetEncoderInfoRequest, context: Any) -> pb.GetEncoderInfoResponse:
        if self.error is not None:
            raise self.error
        if self.gathering is not None:
            await self.gathering.wait()
        return pb.GetEncoderInfoResponse(model="test")

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        return pb.EncodeResponse(results=[pb.EncodeResult() for _ in request.items])

    async def EncodeStream(
        self, requests: AsyncIterator[pb.EncodeStreamRequest], context: Any
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        """Receives while it works, as the encoder does."""
        received: asyncio.Future[Any] = asyncio.ensure_future(anext(requests))
        while (request := await received) is not None:
            received = asyncio.ensure_future(anext(requests, None))
            self.stream_begun.set()
            try:
                await self.stream_gate.wait()
                yield pb.EncodeStreamResponse(item_id=request.item_id)
            except BaseException:
                received.cancel()
                raise

    async def ReadEmbedding(
        self, request: pb.ReadEmbeddingRequest, context: Any
    ) -> AsyncIterator[pb.ReadEmbeddingResponse]:
        try:
            yield pb.ReadEmbeddingResponse(row_offset=0)
            await asyncio.sleep(3600)
        finally:
            self.closed_generators += 1


class Gate:
    """Calls wait in front of it until it is opened."""

    def __init__(self) -> None:
        # Set when a call has come to the gate.
        self.reached = asyncio.Event()
        self._is_open = asyncio.Event()

    async def passed(self) -> None:
        self.reached.set()
        await self._is_open.wait()

    def open(self) -> None:
        self._is_open.set()


def _kinds_handler(error: BaseException, gate: Gate, num_parts: Callable[[], int]) -> grpc.GenericRpcHandler:
    """Returns a method of each kind that fails, those with a stream of answers after its first, and some that do not.

    They read their requests to the end, because grpc.aio clients report an error of their own when a call ends while
    they still send.
    """

    async def fail(request: Any, context: Any) -> bytes:
        if not isinstance(request, bytes):
            assert [message async for message in request] == [b"", b""]
        raise error

    async def fail_later(request: Any, context: Any) -> AsyncIterator[bytes]:
        if not isinstance(request, bytes):
            assert [message async for message in request] == [b""]
        yield b"first"
        raise error

    async def large(request: bytes, context: Any) -> bytes:
        return bytes(MIB + 1)

    async def part(request: bytes, context: Any) -> bytes:
        await gate.passed()
        return bytes(PART_BYTES)

    async def parts(request: bytes, context: Any) -> AsyncIterator[bytes]:
        await gate.passed()
        for _ in range(60 * num_parts()):
            yield bytes(PART_BYTES // 60)

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield bytes(MIB)

    handlers: dict[str, Any] = {
        "Large": grpc.unary_unary_rpc_method_handler(large),
        "Part": grpc.unary_unary_rpc_method_handler(part),
        "Parts": grpc.unary_stream_rpc_method_handler(parts),
        "Flood": grpc.unary_stream_rpc_method_handler(flood),
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(fail),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(fail_later),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(fail),
        "StreamStream": grpc.stream_stream_rpc_method_handler(fail_later),
    }
    return grpc.method_handlers_generic_handler(KINDS, handlers)


class Running:
    """A started service and a channel to it."""

    def __init__(self, service: GrpcService, servicer: RaisingEncoder, telemetry: Telemetry, gate: Gate) -> None:
        self.service = service
        self.servicer = servicer
        # Part and Parts answer when it is open; Parts with so many times `PART_BYTES`.
        self.gate, self.num_parts = gate, 1
        self.telemetry = telemetry
        self.channel = grpc.aio.insecure_channel(service.target, options=CHANNEL_OPTIONS)
        self.encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def health_of(self, name: str) -> Any:
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status


def server_settings(**values: Any) -> ServiceSettings:
    return ServiceSettings(model=pathlib.Path("."), drain_timeout_s=values.pop("drain_timeout_s", 0.0), **values)


@contextlib.asynccontextmanager
async def running_server(
    error: BaseException | None = None,
    is_ready: Any = lambda: True,
    default_timeouts_s: Mapping[str, float] | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    servicer, telemetry, gate = RaisingEncoder(), Telemetry(settings.get("metrics_listen")), Gate()
    entries = [
        ServiceEntry(ENCODER, lambda server: pb_grpc.add_EncoderServiceServicer_to_server(servicer, server)),
        ServiceEntry(
            KINDS,
            lambda server: server.add_generic_rpc_handlers(
                [_kinds_handler(error or ValueError(), gate, lambda: running.num_parts)]
            ),
            default_timeouts_s=default_timeouts_s or {},
            long_methods=frozenset({"Part"}),
        ),
    ]
    service = GrpcService(server_settings(**settings), telemetry, entries, is_ready=is_ready)
    await service.start()
    running = Running(service, servicer, telemetry, gate)
    try:
        yield running
    finally:
        await running.channel.close()
        await service.stop()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


async def rpc_failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
