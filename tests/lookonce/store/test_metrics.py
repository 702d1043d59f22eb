"""The store's counters reach Prometheus under the service's prefix."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.metrics import StoreCollector
from lookonce.store.redis.circuit_breaker import CircuitBreaker
from tests.lookonce.store.entries import SMALL, fresh_key, make_rows, read, write

MakeStore = Callable[..., EmbeddingStore]
ROWS = make_rows(SMALL)


def registry_of(store: EmbeddingStore) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, "decoder"))
    return registry


def test_misses_writes_and_bytes_are_exported(shared_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store, key = make_store(shared_redis.url), fresh_key()
    registry = registry_of(store)
    read(store, key, SMALL, 0, 1)
    write(store, key, SMALL, memoryview(ROWS))
    write(store, key, SMALL, memoryview(ROWS))
    assert read(store, key, SMALL, 0, SMALL.num_rows) == ROWS
    absent = {"operation": "read_rows", "reason": "absent"}
    assert registry.get_sample_value("lookonce_decoder_cache_miss_total", absent) == 1
    assert registry.get_sample_value("lookonce_decoder_store_writes_total", {"outcome": "ok"}) == 1
    assert registry.get_sample_value("lookonce_decoder_store_writes_total", {"outcome": "exists"}) == 1
    num_bytes = registry.get_sample_value("lookonce_decoder_store_read_bytes_total")
    assert num_bytes is not None
    assert num_bytes >= 4096 + len(ROWS)


def test_successful_reads_are_no_misses(shared_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store = make_store(shared_redis.url)
    assert store.ping()
    samples = [sample for metric in registry_of(store).collect() for sample in metric.samples]
    assert not [sample for sample in samples if sample.name == "lookonce_decoder_cache_miss_total"]


def test_exactly_one_breaker_state_is_1(own_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store = make_store(own_redis.url, breaker=CircuitBreaker(failure_threshold=1, backoff_s=60, max_backoff_s=60))
    registry = registry_of(store)

    def states() -> dict[str, float | None]:
        return {
            state: registry.get_sample_value("lookonce_decoder_breaker_state", {"state": state})
            for state in ("closed", "open", "half_open")
        }

    assert states() == {"closed": 1, "open": 0, "half_open": 0}
    own_redis.stop()
    assert not store.ping()
    assert states() == {"closed": 0, "open": 1, "half_open": 0}
