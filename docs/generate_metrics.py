"""Writes the metrics table of docs/operations.md from the registries that both services fill: `make docs`.

Everything is registered as the services do it, with an engine that answers zeros and a cache that nobody connects to.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from decoder_svc.engine.figures import EngineCounters, EngineLoad
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.rows.fetch_metrics import FetchMetrics
from encoder_svc.metrics import EncoderMetrics
from lookonce.server.interceptors import CallMetrics
from lookonce.server.metrics import ServingMetrics
from lookonce.server.quotas import Quotas
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.metrics import StoreCollector

PAGE = pathlib.Path(__file__).with_name("operations.md")
BEGIN = "<!-- metrics: written by `make docs` -->"
END = "<!-- end of metrics -->"
_HEAD = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |"
_OWN = "lookonce_"

Service = Literal["encoder", "decoder"]
SERVICES: tuple[Service, Service] = ("encoder", "decoder")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric family that a service exports."""

    # As queries write it: a counter with its _total, a histogram without _bucket, _sum and _count.
    name: str
    # counter, gauge or histogram.
    kind: str
    # Without a histogram's own `le`.
    labels: tuple[str, ...]
    # Its help text.
    meaning: str

    @property
    def series(self) -> frozenset[str]:
        """Names under which Prometheus stores its samples."""
        if self.kind == "histogram":
            return frozenset(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return frozenset((self.name,))


class _RecordingRegistry(CollectorRegistry):
    """Remembers what is registered: a family without samples does not tell its labels, but its collector knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)


def service_metrics(service: Service) -> list[MetricRow]:
    """What one process of this service exports of its own; the Python client's `process_*` metrics come besides."""
    registry = _RecordingRegistry()
    CallMetrics(registry)
    Quotas(None, registry)
    ServingMetrics(registry, drain_limit_s=0.0)
    if service == "encoder":
        EncoderMetrics(registry)
    else:
        FetchMetrics(registry)
        DecoderMetrics(registry).watch(lambda: EngineLoad(0, 0, 0, 0.0, 0), lambda: EngineCounters(0, 0, 0), "none")
    store = EmbeddingStore("unix:///nowhere", budget_s=0.1, ttl_s=1, max_entry_bytes=4096)
    try:
        registry.register(StoreCollector(store, service))
        return [row for collector in registry.collectors for row in _rows(collector)]
    finally:
        store.close()


def all_metrics() -> list[MetricRow]:
    """What both services export, then what only encoders do, then what only decoders do."""
    encoder, decoder = map(service_metrics, SERVICES)
    shared = [row for row in encoder if row in decoder]
    return [*shared, *(row for row in [*encoder, *decoder] if row not in shared)]


def metrics_text() -> str:
    """The table."""
    rows = all_metrics()
    return "\n".join(
        [_HEAD, *(f"| `{row.name}` | {row.kind} | {', '.join(row.labels)} | {row.meaning} |" for row in rows)]
    )


def page_with_metrics(page: str) -> str:
    """`page` with the text between the two marks replaced. Raises ValueError when a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{metrics_text()}\n\n{END}{after}"


def _rows(collector: Collector) -> list[MetricRow]:
    rows = []
    for family in collector.collect():
        assert family.name.startswith(_OWN), family.name
        # Metrics keep their label names themselves, families of other collectors keep their own; neither publicly.
        labels: Iterable[str] = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(MetricRow(name, family.type, tuple(labels), family.documentation))
    return rows


if __name__ == "__main__":
    PAGE.write_text(page_with_metrics(PAGE.read_text("utf-8")), "utf-8")
