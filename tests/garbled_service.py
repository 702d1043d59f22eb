"""A service whose every reply is bytes that no message parses, behind a real gRPC server."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from lookonce.server.service_entry import ServiceEntry
from lookonce.server.serving import GrpcService
from lookonce.server.settings import ServiceSettings
from lookonce.server.telemetry import Telemetry

_GARBAGE = b"\xff\xff\xff\xff"


@asynccontextmanager
async def garbled_service(service: ServiceDescriptor) -> AsyncIterator[str]:
    """Serves all methods of `service` with garbage and yields the target."""

    async def answer(request: bytes, context: Any) -> bytes:
        return _GARBAGE

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield _GARBAGE
        yield _GARBAGE

    handlers: dict[str, Any] = {
        method.name: grpc.unary_stream_rpc_method_handler(stream)
        if method.server_streaming
        else grpc.unary_unary_rpc_method_handler(answer)
        for method in service.methods
    }
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    entry = ServiceEntry(service.full_name, lambda server: server.add_generic_rpc_handlers([generic]))
    fields: dict[str, Any] = {"model": pathlib.Path("."), "drain_timeout_s": 0.5}
    running = GrpcService(ServiceSettings(**fields), Telemetry(), [entry])
    target = await running.start()
    try:
        yield target
    finally:
        await running.stop()
