"""Decoders for tests: the real service with its real engine on loopback, and messages to send to it."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from decoder_svc.service import DecoderService, open_service
from decoder_svc.settings import DecoderSettings
from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderServiceStub
from lookonce.server.admission.quotas import Quotas
from tests.decoder_svc.encoders import served

if TYPE_CHECKING:
    from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderServiceAsyncStub


@dataclass(frozen=True, slots=True)
class RunningDecoder:
    """A decoder service on loopback."""

    stub: DecoderServiceAsyncStub
    service: DecoderService
    registry: CollectorRegistry
    # host:port
    target: str


@asynccontextmanager
async def running_decoder(
    folder: pathlib.Path, encoder_target: str | None = None, **settings: Any
) -> AsyncIterator[RunningDecoder]:
    """Runs a decoder with small memory pools."""
    defaults: dict[str, Any] = {"num_threads": 1, "num_kv_blocks": 200, "max_context_tokens": 2000, "block_size": 16}
    parsed = DecoderSettings(
        model=folder, encoder_target=encoder_target, drain_timeout_s=0.5, **{**defaults, **settings}
    )
    registry = CollectorRegistry()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        open_service(parsed, registry, Quotas(None, registry)) as service,
        served(parsed, service.entry()) as target,
        grpc.aio.insecure_channel(target, options=options) as channel,
    ):
        yield RunningDecoder(DecoderServiceStub(channel), service, registry, target)


def source(data: bytes, **fields: Any) -> common_pb2.ImageSource:
    """An image given as bytes."""
    return common_pb2.ImageSource(data=data, **fields)


def reference(digest: bytes, **fields: Any) -> common_pb2.ImageSource:
    """An image given by its digest."""
    return common_pb2.ImageSource(key=common_pb2.ContentKey(digest=digest), **fields)


def chat(*parts: str | common_pb2.ImageSource) -> pb.ChatPrompt:
    """Returns a chat of one user message with these parts."""
    content = [pb.ContentPart(text=part) if isinstance(part, str) else pb.ContentPart(image=part) for part in parts]
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER, parts=content)])


def params(*parts: str | common_pb2.ImageSource, **sampling: Any) -> pb.GenerateParams:
    """A chat with one user message; keyword arguments are sampling fields."""
    return pb.GenerateParams(chat=chat(*parts), sampling=pb.SamplingParams(**sampling))


def code_of(call: Callable[[], object]) -> str:
    """Returns the name of the status with which a blocking call ends."""
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code.name
    return "OK"
