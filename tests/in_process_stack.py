"""The services of a `LocalStack` in this process: real gRPC servers, a real Redis, no process for each service.

A process of a service takes four seconds of CPU to import its libraries. Use this where a test is about what the
services answer, and `LocalStack` where it is about processes: their start, end, memory, or loss.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from prometheus_client import CollectorRegistry

from decoder_svc.service import open_service
from decoder_svc.settings import DecoderSettings
from encoder_svc.service import admin_entry, open_control, open_pipeline, service_entry
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_model import VisionModel
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.server.admission.quotas import Quotas
from lookonce.server.serving import GrpcService
from lookonce.server.settings_parser import parse_settings
from lookonce.server.telemetry import Telemetry
from lookonce.store.health import watched_cache
from lookonce.tenants import Tenants

_START_TIMEOUT_S = 120.0
# Health is asked whether a service is ready five times a second.
_HEALTH_S = 0.25


@dataclass(frozen=True, slots=True)
class RunningService:
    """One service: its address and its metrics."""

    target: str
    registry: CollectorRegistry
    is_ready: Callable[[], bool]
    # Address of the operators' calls; None where there are none.
    admin_target: str | None = None
    # The id of this process, which runs all services.
    pid: int = field(default_factory=os.getpid)


class InProcessStack:
    """A context manager with the arguments and attributes of `LocalStack` that tests and benchmarks use."""

    def __init__(
        self,
        model: pathlib.Path,
        *,
        redis: str | None = None,
        num_encoders: int = 1,
        num_decoders: int = 1,
        dtype: str = "auto",
        encoder_arguments: Sequence[str] = (),
        decoder_arguments: Sequence[str] = (),
    ) -> None:
        """`redis` is a URL; None starts an embedded server. The others are those of `LocalStack`."""
        self._shared = ("--model", str(model), "--dtype", dtype, "--drain-timeout-s", "5", "--listen", "127.0.0.1:0")
        self._redis_url = redis
        self._num_encoders = num_encoders
        self._num_decoders = num_decoders
        self._encoder_arguments = tuple(encoder_arguments)
        self._decoder_arguments = tuple(decoder_arguments)
        # Set on the services' event loop when the block ends.
        self._is_over = asyncio.Event()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name="services", daemon=True)
        self.redis: EmbeddedRedis | None = None
        self.encoders: list[RunningService] = []
        self.decoders: list[RunningService] = []

    @property
    def encoder_targets(self) -> list[str]:
        """Addresses of the encoders, host:port."""
        return [service.target for service in self.encoders]

    @property
    def decoder_targets(self) -> list[str]:
        """Addresses of the decoders, host:port."""
        return [service.target for service in self.decoders]

    @property
    def admin_targets(self) -> list[str]:
        """Addresses of the encoders' operators' calls, host:port."""
        return [service.admin_target for service in self.encoders if service.admin_target is not None]

    @property
    def redis_url(self) -> str | None:
        """The Redis URL of all services."""
        return self._redis_url

    def metric(self, services: Sequence[RunningService], name: str) -> float:
        """Returns the sum of one metric over its labels and over `services`."""
        return sum(
            sample.value
            for service in services
            for metric in service.registry.collect()
            for sample in metric.samples
            if sample.name == name
        )

    def __enter__(self) -> Self:
        if self._redis_url is None:
            self.redis = EmbeddedRedis()
            self._redis_url = self.redis.__enter__().url
        self._thread.start()
        self._loop.result(_START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.result().call_soon_threadsafe(self._is_over.set)
        self._thread.join()
        if self.redis is not None:
            self.redis.__exit__(None, None, None)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._loop.done():
                raise
            self._loop.set_exception(error)

    async def _serve(self) -> None:
        redis = ("--redis-url", str(self._redis_url))
        async with AsyncExitStack() as exits:
            for _ in range(self._num_encoders):
                arguments = [*self._shared, *redis, "--admin-listen", "127.0.0.1:0", *self._encoder_arguments]
                self.encoders.append(await start_encoder(arguments, exits))
            targets = ("--encoder-target", f"ipv4:{','.join(self.encoder_targets)}") if self.encoders else ()
            for _ in range(self._num_decoders):
                arguments = [*self._shared, *redis, *targets, "--kv-cache-memory-share", "0.2"]
                self.decoders.append(await start_decoder([*arguments, *self._decoder_arguments], exits))
            await until_ready(*self.encoders, *self.decoders)
            self._loop.set_result(asyncio.get_running_loop())
            await self._is_over.wait()


async def start_encoder(arguments: Sequence[str], exits: AsyncExitStack) -> RunningService:
    """Starts an encoder with these flags on the running event loop; `exits` drains and ends it."""
    settings = parse_settings(EncoderSettings, arguments, "encoder_svc")
    telemetry = Telemetry()
    model = VisionModel.load_warm(settings.vision)
    pipeline = await exits.enter_async_context(open_pipeline(settings, model, telemetry.registry))
    control = await exits.enter_async_context(open_control(settings, pipeline))
    parts = await exits.enter_async_context(watched_cache(pipeline.tiers.store))
    tenants = Tenants(None)
    service = GrpcService(
        settings,
        telemetry,
        [service_entry(pipeline, tenants, Quotas(None, telemetry.registry), settings)],
        admin_services=[admin_entry(pipeline, tenants, control)],
        is_ready=lambda: pipeline.is_healthy,
        parts=parts,
    )
    exits.push_async_callback(service.stop)
    target = await service.start()
    return RunningService(target, telemetry.registry, lambda: pipeline.is_healthy, service.admin_target)


async def start_decoder(arguments: Sequence[str], exits: AsyncExitStack) -> RunningService:
    """Starts a decoder with these flags on the running event loop; `exits` drains and ends it."""
    settings = parse_settings(DecoderSettings, arguments, "decoder_svc")
    telemetry = Telemetry()
    decoder = await exits.enter_async_context(
        open_service(settings, telemetry.registry, Quotas(None, telemetry.registry))
    )
    parts = await exits.enter_async_context(watched_cache(decoder.store))
    service = GrpcService(settings, telemetry, [decoder.entry()], is_ready=decoder.is_ready, parts=parts)
    exits.push_async_callback(service.stop)
    return RunningService(await service.start(), telemetry.registry, decoder.is_ready)


async def until_ready(*services: RunningService) -> None:
    """Waits until all services are ready, and health has had the time to say so."""
    async with asyncio.timeout(_START_TIMEOUT_S):
        while not all(service.is_ready() for service in services):
            await asyncio.sleep(0.01)
    await asyncio.sleep(_HEALTH_S)
