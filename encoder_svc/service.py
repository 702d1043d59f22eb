"""Wires the encoder's parts in the order of their dependencies, and takes them down in the opposite one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from prometheus_client import CollectorRegistry

from encoder_svc.admin_servicer import SERVICE_NAME as ADMIN_SERVICE_NAME
from encoder_svc.admin_servicer import EncoderAdminServicer
from encoder_svc.cache.cache_admin import CacheAdmin
from encoder_svc.cache.cache_control import CacheControl
from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.done_channel import DoneChannel
from encoder_svc.cache.encode_lease import EncodeLeases
from encoder_svc.cache.fleet_flight import FleetFlight
from encoder_svc.cache.image_encoder import ImageEncoder
from encoder_svc.cache.local_cache import LocalCache
from encoder_svc.cache.pipeline import EncodePipeline
from encoder_svc.cache.queue_places import QueuePlaces
from encoder_svc.images.pixel_budget import PixelBudget
from encoder_svc.images.preprocess import Preprocessor
from encoder_svc.images.quarantine import Quarantine, Stage
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.servicer import SERVICE_NAME, EncoderServicer
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.batcher import BatchLimits, ForwardBatcher
from encoder_svc.vision.row_format import stored_forward
from encoder_svc.vision.vision_model import VisionModel
from lookonce.devices.base import DevicePlatform
from lookonce.encoder.v1.encoder_service_pb2_grpc import (
    add_EncoderAdminServiceServicer_to_server,
    add_EncoderServiceServicer_to_server,
)
from lookonce.media.image_header import ImageLimits
from lookonce.model.kernels.kernel_report import report_kernels
from lookonce.model.kernels.kernel_trial import kernel_choices
from lookonce.server.admission.quotas import Quotas
from lookonce.server.encoder_health import health_name
from lookonce.server.service_entry import ServiceEntry
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.forget_channel import ForgetListener
from lookonce.store.metrics import StoreCollector
from lookonce.store.sealing import load_sealer
from lookonce.tenants import Tenants

# A failed operation is tried once more, since a failed look-up or write costs a forward pass.
_STORE_ATTEMPTS = 2
# Threads that talk to Redis, for rows and for leases each. They mostly wait for the network; four keep a link busy.
_STORE_THREADS = 4


@asynccontextmanager
async def open_pipeline(
    settings: EncoderSettings, model: VisionModel, registry: CollectorRegistry
) -> AsyncIterator[EncodePipeline]:
    """Opens the pipeline of a process and closes it after the block.

    Raises ConfigurationError for an unusable Redis URL.
    """
    metrics = EncoderMetrics(registry)
    metrics.weight_bytes.set(model.weight_bytes)
    report_kernels(registry, kernel_choices())
    limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels, settings.max_image_aspect)
    async with AsyncExitStack() as stack:
        store = _open_store(settings)
        listener = None
        if store is not None:
            stack.callback(store.close)
            registry.register(StoreCollector(store, "encoder"))
            # The tiers exist before the first message, since it starts below.
            listener = ForgetListener(_redis_url(settings), settings.redis_budget_s, lambda one: tiers.forget(one))
        tiers = CacheTiers(
            LocalCache(settings.local_cache_bytes),
            store,
            metrics,
            num_threads=_STORE_THREADS,
            forget_watch=listener,
            settle_s=_settle_s(settings),
        )
        if listener is not None:
            listener.start()
            stack.push_async_callback(listener.close)
            # The first look at the token of removals takes encodes in progress for forgotten. There are none yet.
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * settings.redis_budget_s):
                    await listener.wait_until_listening()
        batcher = ForwardBatcher(
            stored_forward(model, metrics), model.warm_up, batch_limits(settings, model.platform), metrics
        )
        fleet = None if store is None else _open_fleet(settings, store, tiers, batcher, metrics)
        encoder = _image_encoder(settings, model, limits, batcher, metrics)
        pipeline = EncodePipeline(model, encoder, tiers, fleet, limits, metrics)
        stack.push_async_callback(pipeline.close)
        yield pipeline


@asynccontextmanager
async def open_control(settings: EncoderSettings, pipeline: EncodePipeline) -> AsyncIterator[CacheControl]:
    """Opens the operators' control over the caches of a running pipeline, and closes it after the block."""
    admin = None if settings.redis_url is None else CacheAdmin(_redis_url(settings))
    settle_s = _settle_s(settings)
    control = CacheControl(pipeline.tiers, admin, pipeline.model.fingerprint, ttl_s=settings.ttl_s, restore_s=settle_s)
    try:
        yield control
    finally:
        control.close()


def admin_entry(pipeline: EncodePipeline, tenants: Tenants, control: CacheControl) -> ServiceEntry:
    """The operators' service, for their own address, as the server shell registers it."""
    servicer = EncoderAdminServicer(pipeline, tenants, control)
    return ServiceEntry(ADMIN_SERVICE_NAME, lambda server: add_EncoderAdminServiceServicer_to_server(servicer, server))


def service_entry(
    pipeline: EncodePipeline, tenants: Tenants, quotas: Quotas, settings: EncoderSettings
) -> ServiceEntry:
    """The clients' service, as the server shell registers it."""
    servicer = EncoderServicer(pipeline, tenants, quotas, settings)
    return ServiceEntry(
        SERVICE_NAME,
        lambda server: add_EncoderServiceServicer_to_server(servicer, server),
        health_names=(health_name(pipeline.model.fingerprint),),
        long_methods=frozenset({"Encode"}),
    )


def batch_limits(settings: EncoderSettings, platform: DevicePlatform) -> BatchLimits:
    """Bounds of queue and passes. In deterministic mode every image has a pass of its own."""
    return BatchLimits(
        max_images=1 if settings.deterministic else settings.max_forward_images,
        max_bytes=settings.max_forward_bytes or platform.max_forward_bytes,
        max_queued=settings.max_queued_images,
        max_pass_s=settings.max_forward_s,
    )


def _image_encoder(
    settings: EncoderSettings,
    model: VisionModel,
    limits: ImageLimits,
    batcher: ForwardBatcher,
    metrics: EncoderMetrics,
) -> ImageEncoder:
    preprocessor = Preprocessor(
        model.adapter,
        limits,
        settings.preprocess_workers,
        settings.decode_time_limits,
        Quarantine(Stage.DECODE, metrics),
    )
    return ImageEncoder(
        model,
        preprocessor,
        batcher,
        metrics,
        places=QueuePlaces(settings.max_queued_images),
        budget=PixelBudget(settings.max_prepared_bytes, settings.preprocess_workers),
        quarantine=Quarantine(Stage.FORWARD, metrics),
    )


def _open_fleet(
    settings: EncoderSettings,
    store: EmbeddingStore,
    tiers: CacheTiers,
    batcher: ForwardBatcher,
    metrics: EncoderMetrics,
) -> FleetFlight:
    done = DoneChannel(_redis_url(settings), settings.redis_budget_s)
    done.start()
    return FleetFlight(
        EncodeLeases(store, settings.encode_lease_s),
        done,
        tiers.find_again,
        metrics,
        num_threads=_STORE_THREADS,
        is_answering=lambda: batcher.is_answering,
    )


def _settle_s(settings: EncoderSettings) -> float:
    """Longest time of two operations of a replica: it makes sure that an image was not removed, and writes its rows."""
    return 2 * _STORE_ATTEMPTS * settings.redis_budget_s


def _redis_url(settings: EncoderSettings) -> str:
    assert settings.redis_url is not None, "where there is a store there is a URL"
    return settings.redis_url.get_secret_value()


def _open_store(settings: EncoderSettings) -> EmbeddingStore | None:
    if settings.redis_url is None:
        return None
    return EmbeddingStore(
        _redis_url(settings),
        settings.redis_budget_s,
        settings.ttl_s,
        settings.max_entry_bytes,
        sealer=load_sealer(settings.seal_key_file),
        num_attempts=_STORE_ATTEMPTS,
    )
