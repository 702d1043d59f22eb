"""Encoders for the decoder's tests: real ones on loopback, and ones whose answers a test chooses."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from decoder_svc.rows.encoder_channel import ChannelSettings
from decoder_svc.rows.encoder_client import EncoderClient
from decoder_svc.rows.encoder_info import ExpectedRows
from encoder_svc.service import open_pipeline, service_entry
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_config import VisionConfig
from encoder_svc.vision.vision_model import VisionModel
from lookonce.encoder.v1.encoder_service_pb2_grpc import (
    EncoderServiceServicer,
    add_EncoderServiceServicer_to_server,
)
from lookonce.server.admission.quotas import Quotas
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.serving import GrpcService
from lookonce.server.settings import MIB, ServiceSettings
from lookonce.server.telemetry import Telemetry
from lookonce.tenants import Tenants

CHANNEL = ChannelSettings(max_message_bytes=MIB, keepalive_time_s=30, keepalive_timeout_s=5)
_VISION_MODELS: dict[VisionConfig, VisionModel] = {}


def client(target: str, model_type: str = "llava", hidden_size: int = 64, num_levels: int = 0) -> EncoderClient:
    """A client that expects the rows of the tiny models."""
    return EncoderClient(target, ExpectedRows(model_type, hidden_size, num_levels), CHANNEL)


@asynccontextmanager
async def running_encoder(folder: pathlib.Path, **settings: Any) -> AsyncIterator[str]:
    """Runs a real encoder service and yields its target. Its model is loaded once for each choice of settings."""
    parsed = EncoderSettings(model=folder, drain_timeout_s=0.5, **settings)
    loaded = parsed.vision
    if loaded not in _VISION_MODELS:
        _VISION_MODELS[loaded] = VisionModel.load(parsed.vision)
    async with (
        open_pipeline(parsed, _VISION_MODELS[loaded], CollectorRegistry()) as pipeline,
        served(parsed, service_entry(pipeline, Tenants(None), Quotas(None, CollectorRegistry()), parsed)) as target,
    ):
        yield target


@asynccontextmanager
async def scripted_encoder(servicer: EncoderServiceServicer) -> AsyncIterator[str]:
    """Serves `servicer` in the place of an encoder and yields its target."""
    fields: dict[str, Any] = {"model": pathlib.Path("."), "drain_timeout_s": 0.5}
    settings = ServiceSettings(**fields)
    entry = ServiceEntry(
        "lookonce.encoder.v1.EncoderService",
        lambda server: add_EncoderServiceServicer_to_server(servicer, server),
    )
    async with served(settings, entry) as target:
        yield target


@asynccontextmanager
async def served(
    settings: ServiceSettings,
    entry: ServiceEntry,
    is_ready: Callable[[], bool] = lambda: True,
    quotas: Quotas | None = None,
) -> AsyncIterator[str]:
    """Runs a real server around one service and yields its target."""
    service = GrpcService(settings, Telemetry(), [entry], quotas=quotas, is_ready=is_ready)
    target = await service.start()
    try:
        yield target
    finally:
        await service.stop()
