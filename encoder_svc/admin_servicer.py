"""EncoderAdminService: the operators' RPCs on the caches. Every change leaves audit lines in the log."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
from google.protobuf import duration_pb2

from encoder_svc import wire
from encoder_svc.cache.admin_commands import EntryStatistics
from encoder_svc.cache.cache_control import CacheControl, Eviction, TierStatistics
from encoder_svc.cache.pipeline import EncodePipeline
from encoder_svc.servicer import MAX_LOOKUP_KEYS
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ContentKey, ProcessorOptions, Tenant
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.errors import InvalidParameterError
from lookonce.identity import TENANT_NAME, current_identity
from lookonce.logs import get_logger
from lookonce.tenants import Tenants

SERVICE_NAME = "lookonce.encoder.v1.EncoderAdminService"

# Share of a call's time after which Redis is not waited for any longer, so that the answer arrives before the deadline.
_REDIS_SHARE = 0.9

_audit = get_logger("lookonce.audit")


class EncoderAdminServicer(pb_grpc.EncoderAdminServiceServicer):
    """Handlers of the five RPCs."""

    def __init__(self, pipeline: EncodePipeline, tenants: Tenants, control: CacheControl) -> None:
        self._pipeline = pipeline
        self._tenants = tenants
        self._control = control
        # Whether an image has a second entry, for prompts that show other images beside it.
        self._depends_on_image_count = pipeline.model.adapter.family.depends_on_image_count

    async def GetCacheStats(
        self,
        request: pb.GetCacheStatsRequest,
        context: grpc.aio.ServicerContext[pb.GetCacheStatsRequest, pb.GetCacheStatsResponse],
    ) -> pb.GetCacheStatsResponse:
        """Answers with figures since the start of this process; shared entries are those of this encoder."""
        shared = await self._control.shared_statistics(until_s=_until_s(context))
        return pb.GetCacheStatsResponse(local=_tier(self._control.local_statistics()), shared=_tier(shared))

    async def DescribeEmbeddings(
        self,
        request: pb.DescribeEmbeddingsRequest,
        context: grpc.aio.ServicerContext[pb.DescribeEmbeddingsRequest, pb.DescribeEmbeddingsResponse],
    ) -> pb.DescribeEmbeddingsResponse:
        """Answers with one result per key, in the order of the keys."""
        keys = self._selected(request.selection)
        found = await self._control.describe(keys, until_s=_until_s(context))
        results = [
            _statistics(entry, is_local=self._control.is_local(key)) for key, entry in zip(keys, found, strict=True)
        ]
        return pb.DescribeEmbeddingsResponse(results=results)

    async def PinEmbeddings(
        self,
        request: pb.PinEmbeddingsRequest,
        context: grpc.aio.ServicerContext[pb.PinEmbeddingsRequest, pb.PinEmbeddingsResponse],
    ) -> pb.PinEmbeddingsResponse:
        """Pins the selected images, or unpins them."""
        keys = self._selected(request.selection)
        with _audited("unpin" if request.unpin else "pin", request.selection.tenant) as outcome:
            found = await self._control.pin(keys, unpin=request.unpin, until_s=_until_s(context))
            outcome["num_images"] = sum(found)
        return pb.PinEmbeddingsResponse(found=found)

    async def PrewarmEmbeddings(
        self,
        request: pb.PrewarmEmbeddingsRequest,
        context: grpc.aio.ServicerContext[pb.PrewarmEmbeddingsRequest, pb.PrewarmEmbeddingsResponse],
    ) -> pb.PrewarmEmbeddingsResponse:
        """Reads the selected images from the shared cache into this process."""
        keys = self._selected(request.selection)
        with _audited("prewarm", request.selection.tenant) as outcome:
            until_s = _until_s(context)
            found = [await self._control.prewarm(key, until_s=until_s) for key in keys]
            outcome["num_images"] = sum(found)
        return pb.PrewarmEmbeddingsResponse(found=found)

    async def EvictEmbeddings(
        self,
        request: pb.EvictEmbeddingsRequest,
        context: grpc.aio.ServicerContext[pb.EvictEmbeddingsRequest, pb.EvictEmbeddingsResponse],
    ) -> pb.EvictEmbeddingsResponse:
        """Removes images everywhere. Idempotent: an image that is gone already is no error."""
        if bool(request.keys) + request.all + request.all_of_tenant != 1:
            raise InvalidParameterError("keys", "exactly one of keys, all and all_of_tenant must be set")
        tenant = self._tenant("tenant", request.tenant)
        what = "keys" if request.keys else "all" if request.all else "tenant"
        with _audited("evict", request.tenant, what=what) as outcome:
            eviction = await self._evict(request, tenant, _until_s(context))
            outcome["num_images"] = eviction.num_entries
        images = [pb.EvictedImage(entries=image.num_images, pairs=image.num_pairs) for image in eviction.images]
        return pb.EvictEmbeddingsResponse(evicted=eviction.num_entries, images=images)

    async def _evict(self, request: pb.EvictEmbeddingsRequest, tenant: Tenant, until_s: float) -> Eviction:
        if request.keys:
            options = wire.parse_options(request)
            keys = self._keys(request.keys, options, tenant)
            if options.frame_size is not None:
                return await self._control.evict_pairs(keys, until_s=until_s)
            variants = {options, ProcessorOptions()}
            if self._depends_on_image_count:
                variants |= {replace(one, beside_others=True) for one in variants}
            digests = [key.digest for key in keys]
            keys = [self._pipeline.key_of(digest, one, tenant) for one in variants for digest in digests]
            return await self._control.evict(digests, keys, tenant, until_s=until_s)
        if request.all:
            return Eviction(await self._control.evict_all(until_s=until_s), [])
        return Eviction(await self._control.evict_tenant(tenant, until_s=until_s), [])

    def _selected(self, selection: pb.EmbeddingSelection) -> list[ContentKey]:
        tenant = self._tenant("selection.tenant", selection.tenant)
        return self._keys(selection.keys, wire.parse_options(selection), tenant)

    def _tenant(self, field: str, name: str) -> Tenant:
        """Returns the tenant of a name. A misspelt one has no images, and its call would succeed without an effect."""
        if not TENANT_NAME.fullmatch(name):
            raise InvalidParameterError(field, f"no tenant can have this name; it must match {TENANT_NAME.pattern}")
        return self._tenants.named(name)

    def _keys(
        self, keys: Sequence[common_pb2.ContentKey], options: ProcessorOptions, tenant: Tenant
    ) -> list[ContentKey]:
        if len(keys) > MAX_LOOKUP_KEYS:
            raise InvalidParameterError("keys", f"at most {MAX_LOOKUP_KEYS} keys in a call, not {len(keys)}")
        for key in keys:
            self._pipeline.check_fingerprint(key.encoder_fingerprint)
        digests = [wire.parse_key(key, f"keys[{index}]") for index, key in enumerate(keys)]
        return [self._pipeline.key_of(digest, options, tenant) for digest in digests]


def _until_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Returns when to stop waiting for Redis, on the monotonic clock; never for a call without a deadline."""
    remaining_s: float | None = context.time_remaining()
    return math.inf if remaining_s is None else time.monotonic() + _REDIS_SHARE * remaining_s


@contextlib.contextmanager
def _audited(action: str, tenant: str, **facts: object) -> Iterator[dict[str, object]]:
    """Logs one line before the block and one after it, also when the block raises."""
    log = _audit.bind(action=action, identity=current_identity().name, tenant=tenant or "default", **facts)
    log.info("cache administration begins")
    outcome: dict[str, object] = {"succeeded": False}
    try:
        yield outcome
        outcome["succeeded"] = True
    finally:
        log.info("cache administration ends", **outcome)


def _tier(found: TierStatistics) -> pb.CacheTierStats:
    return pb.CacheTierStats(
        entries=found.num_entries,
        bytes=found.num_bytes,
        capacity_bytes=found.capacity_bytes,
        hits=found.num_hits,
        misses=found.num_misses,
        evictions=found.num_evictions,
    )


def _statistics(entry: EntryStatistics | None, *, is_local: bool) -> pb.EmbeddingStatistics:
    if entry is None:
        return pb.EmbeddingStatistics(cached_locally=is_local)
    found = pb.EmbeddingStatistics(
        cached=True,
        cached_locally=is_local,
        size_bytes=entry.num_bytes,
        pinned=entry.ttl_s is None,
        frequency=entry.frequency,
    )
    if entry.ttl_s is not None:
        found.ttl.CopyFrom(duration_pb2.Duration(seconds=int(entry.ttl_s), nanos=int(entry.ttl_s % 1 * 1e9)))
    return found
