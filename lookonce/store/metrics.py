"""What the shared cache's client counted, for Prometheus; the same in every service but for the name's beginning."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.circuit_breaker import BreakerState
from lookonce.store.stats import StoreOperation


class StoreCollector(Collector):
    """Misses by reason, bytes of values read, writes by outcome, and the breaker's state."""

    def __init__(self, store: EmbeddingStore, service: str) -> None:
        """Names begin with `lookonce_{service}_`."""
        self._store = store
        self._prefix = f"lookonce_{service}_"

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        misses = CounterMetricFamily(
            f"{self._prefix}cache_miss_total",
            "Why the shared cache had nothing; absent is the only reason that is no fault.",
            labels=["operation", "reason"],
        )
        writes = CounterMetricFamily(
            f"{self._prefix}store_writes_total",
            "Writes to the shared cache, by how they ended; none in decoders, which only read.",
            labels=["outcome"],
        )
        for (operation, outcome), count in self._store.stats.snapshot().items():
            if operation == StoreOperation.WRITE.value:
                writes.add_metric([outcome], count)
            elif outcome != "ok":
                misses.add_metric([operation, outcome], count)
        read = CounterMetricFamily(
            f"{self._prefix}store_read_bytes_total",
            "Bytes of values that came from the shared cache, headers and what a block has beyond the rows included.",
            value=self._store.stats.bytes_read,
        )
        state = GaugeMetricFamily(
            f"{self._prefix}breaker_state",
            "1 for the state of the shared cache's circuit breaker that is in force: closed, open or half_open.",
            labels=["state"],
        )
        for candidate in BreakerState:
            state.add_metric([candidate.value], float(candidate is self._store.state))
        yield from (misses, writes, read, state)
