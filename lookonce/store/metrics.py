"""Prometheus metrics of the shared cache's client. Each service has them under its own prefix."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.circuit_breaker import BreakerState
from lookonce.store.stats import StoreOperation


class StoreCollector(Collector):
    """Exports misses by reason, bytes of values read, writes by outcome, and the breaker's state."""

    def __init__(self, store: EmbeddingStore, service: str) -> None:
        """`service` becomes part of the prefix of all names, `lookonce_{service}_`."""
        self._store = store
        self._prefix = f"lookonce_{service}_"

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; the registry calls this at every scrape."""
        misses = CounterMetricFamily(
            f"{self._prefix}cache_miss_total",
            "Misses of the shared cache by reason; absent is the only reason that is no fault.",
            labels=["operation", "reason"],
        )
        writes = CounterMetricFamily(
            f"{self._prefix}store_writes_total",
            "Writes to the shared cache by outcome; none in decoders, which only read.",
            labels=["outcome"],
        )
        for (operation, outcome), count in self._store.stats.snapshot().items():
            if operation == StoreOperation.WRITE.value:
                writes.add_metric([outcome], count)
            elif outcome != "ok":
                misses.add_metric([operation, outcome], count)
        read = CounterMetricFamily(
            f"{self._prefix}store_read_bytes_total",
            "Bytes of values read from the shared cache, including headers and rows of a block that were not needed.",
            value=self._store.stats.bytes_read,
        )
        state = GaugeMetricFamily(
            f"{self._prefix}breaker_state",
            "1 for the current state of the shared cache's circuit breaker: closed, open or half_open.",
            labels=["state"],
        )
        for candidate in BreakerState:
            state.add_metric([candidate.value], float(candidate is self._store.state))
        yield from (misses, writes, read, state)
