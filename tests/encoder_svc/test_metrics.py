"""The encoder's gauges and times measure what their descriptions say."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.metrics import EncoderMetrics
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.forgotten import Forgotten
from tests.encoder_svc.conftest import StartEncoder
from tests.encoder_svc.encode_requests import encode_one, png
from tests.lookonce.store.entries import fresh_key


async def test_entries_and_bytes_of_the_local_cache_are_those_that_it_keeps() -> None:
    registry = CollectorRegistry()
    meta = EmbeddingMeta(4, 8, 0, RowDtype.FLOAT32, 100, 100)
    tiers = CacheTiers(LocalCache(2 * meta.size_bytes), None, EncoderMetrics(registry), num_threads=1)
    keys = [fresh_key() for _ in range(3)]

    def kept() -> tuple[float | None, float | None]:
        names = ("lookonce_encoder_local_cache_entries", "lookonce_encoder_local_cache_bytes")
        return registry.get_sample_value(names[0]), registry.get_sample_value(names[1])

    try:
        for key in keys:
            await tiers.put(key, LocalEmbedding(meta, memoryview(bytes(meta.size_bytes))), refresh=False)
        assert kept() == (2, 2 * meta.size_bytes), "the third made room for itself"
        tiers.forget(Forgotten(frozenset({keys[2].value})))
        assert kept() == (1, meta.size_bytes)
    finally:
        tiers.close()


async def test_every_image_that_is_encoded_has_a_time_in_the_queue_and_a_hit_has_none(
    start_encoder: StartEncoder,
) -> None:
    async with start_encoder("llava_clip") as encoder:
        for seed in (1, 2, 1):
            await encode_one(encoder, png(seed))
        assert encoder.metric("lookonce_encoder_queue_seconds_count") == 2
        assert encoder.metric("lookonce_encoder_queue_seconds_sum") > 0
