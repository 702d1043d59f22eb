"""Requests and results of operators' calls ⇄ protobuf, for both clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lookonce.admin.results import CacheStats, EntryStats, EvictedImage, TierStats
from lookonce.common.v1 import common_pb2
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.errors import InvalidParameterError
from lookonce.identity import TENANT_NAME
from lookonce.images import ImageRef
from lookonce.sdk.encode_plan import MAX_LOOKUP_KEYS
from lookonce.sdk.messages import assign_max_pixels


def checked_tenant(tenant: str) -> str:
    """Returns the name. Raises InvalidParameterError for one that no tenant can have: nothing would be found."""
    given: object = tenant
    if not isinstance(given, str) or not TENANT_NAME.fullmatch(given):
        raise InvalidParameterError(
            "tenant", f"no tenant can have the name {given!r}; it must match {TENANT_NAME.pattern}"
        )
    return given


def eviction_requests(
    images: Sequence[ImageRef], tenant: str
) -> Iterator[tuple[Sequence[ImageRef], pb.EvictEmbeddingsRequest]]:
    """Yields removals of at most 256 images, each with its images. Options do not matter: all entries are removed."""
    checked_tenant(tenant)
    for start in range(0, len(images), MAX_LOOKUP_KEYS):
        chunk = images[start : start + MAX_LOOKUP_KEYS]
        yield chunk, pb.EvictEmbeddingsRequest(keys=[_key(image) for image in chunk], tenant=tenant)


def evicted_images(images: Sequence[ImageRef], response: pb.EvictEmbeddingsResponse) -> list[EvictedImage]:
    """Returns the result of each image of one removal."""
    results = zip(images, response.images, strict=True)
    return [EvictedImage(image, result.entries, result.pairs) for image, result in results]


def selections(images: Sequence[ImageRef], tenant: str) -> Iterator[tuple[list[int], pb.EmbeddingSelection]]:
    """Yields selections of at most 256 images with equal options, each with the positions of its images."""
    checked_tenant(tenant)
    by_options: dict[tuple[int | None, bool], list[int]] = {}
    for index, image in enumerate(images):
        by_options.setdefault((image.max_pixels, image.beside_others), []).append(index)
    for (max_pixels, beside_others), group in by_options.items():
        for start in range(0, len(group), MAX_LOOKUP_KEYS):
            chunk = group[start : start + MAX_LOOKUP_KEYS]
            keys = [_key(images[index]) for index in chunk]
            selection = pb.EmbeddingSelection(keys=keys, beside_others=beside_others, tenant=tenant)
            assign_max_pixels(selection, max_pixels)
            yield chunk, selection


def entry_stats(image: ImageRef, found: pb.EmbeddingStatistics) -> EntryStats:
    """Returns the state of one image's rows."""
    return EntryStats(
        image,
        found.cached,
        found.cached_locally,
        found.size_bytes,
        found.ttl.ToNanoseconds() / 1e9 if found.HasField("ttl") else None,
        found.pinned,
        found.frequency if found.HasField("frequency") else None,
    )


def cache_stats(response: pb.GetCacheStatsResponse) -> CacheStats:
    """Returns the counters of both caches."""
    return CacheStats(_tier(response.local), _tier(response.shared))


def _tier(found: pb.CacheTierStats) -> TierStats:
    return TierStats(found.entries, found.bytes, found.capacity_bytes, found.hits, found.misses, found.evictions)


def _key(image: ImageRef) -> common_pb2.ContentKey:
    return common_pb2.ContentKey(digest=image.digest)
