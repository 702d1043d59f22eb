"""Writes the metrics table of docs/operations/observability.md from the services' own registries: `make docs`.

It registers metrics as the services do, with a stand-in engine that reports zeros and a store that never connects.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from decoder_svc.adapter_metrics import AdapterMetrics
from decoder_svc.engine.core import EngineFacts
from decoder_svc.engine.figures import EngineCounters, EngineLimits, EngineLoad
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.rows.fetch_metrics import FetchMetrics
from docs.marked_page import replace_between
from encoder_svc.metrics import EncoderMetrics
from gateway_svc.access import AccessMetrics
from lookonce.model.kernels.kernel_report import KernelCollector
from lookonce.server.admission.quotas import Quotas
from lookonce.server.interceptors import CallMetrics
from lookonce.server.metrics import ServingMetrics
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.metrics import StoreCollector

PAGE = pathlib.Path(__file__).parent / "operations/observability.md"
BEGIN = "<!-- metrics: written by `make docs` -->"
END = "<!-- end of metrics -->"
_HEAD = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |"
_OWN = "lookonce_"

Service = Literal["encoder", "decoder"]
SERVICES: tuple[Service, Service] = ("encoder", "decoder")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric family that a service exports."""

    # The name in queries: with _total for a counter, without _bucket, _sum and _count for a histogram.
    name: str
    # The metric's type: counter, gauge or histogram.
    kind: str
    # Label names, without the `le` that every histogram has.
    labels: tuple[str, ...]
    # The metric's help text.
    meaning: str

    @property
    def series(self) -> frozenset[str]:
        """Names under which Prometheus stores its samples."""
        if self.kind == "histogram":
            return frozenset(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return frozenset((self.name,))


class _RecordingRegistry(CollectorRegistry):
    """Registry that remembers its collectors: only a collector knows the labels of a metric without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)


def service_metrics(service: Service) -> list[MetricRow]:
    """Returns the metrics that one process of this service exports, without the Python client's `process_*` metrics."""
    registry = _RecordingRegistry()
    CallMetrics(registry)
    Quotas(None, registry)
    ServingMetrics(registry, drain_limit_s=0.0)
    if service == "encoder":
        EncoderMetrics(registry)
    else:
        FetchMetrics(registry)
        facts = EngineFacts(EngineLimits(1, 1, 1, 1, 1, 1, 1, 1), "none", 0)
        DecoderMetrics(registry).watch(lambda: EngineLoad(0, 0, 0, 0.0, 0), lambda: EngineCounters(0, 0, 0), facts)
        AdapterMetrics(registry, lambda: ())
    store = EmbeddingStore("unix:///nowhere", budget_s=0.1, ttl_s=1, max_entry_bytes=4096)
    try:
        registry.register(StoreCollector(store, service))
        registry.register(KernelCollector([]))
        return [row for collector in registry.collectors for row in _rows(collector)]
    finally:
        store.close()


def all_metrics() -> list[MetricRow]:
    """Returns the metrics that encoders and decoders share, then those of each alone, then the gateway's."""
    encoder, decoder = map(service_metrics, SERVICES)
    shared = [row for row in encoder if row in decoder]
    return [*shared, *(row for row in [*encoder, *decoder] if row not in shared), *gateway_metrics()]


def gateway_metrics() -> list[MetricRow]:
    """Returns the metrics that a gateway exports."""
    registry = _RecordingRegistry()
    AccessMetrics(registry)
    return [row for collector in registry.collectors for row in _rows(collector)]


def metrics_text() -> str:
    """Returns the table of all metrics in Markdown."""
    rows = all_metrics()
    return "\n".join(
        [_HEAD, *(f"| `{row.name}` | {row.kind} | {', '.join(row.labels)} | {row.meaning} |" for row in rows)]
    )


def page_with_metrics(page: str) -> str:
    """Returns `page` with a current table between its marks. Raises ValueError when a mark is missing."""
    return replace_between(page, BEGIN, END, metrics_text())


def _rows(collector: Collector) -> list[MetricRow]:
    rows = []
    for family in collector.collect():
        assert family.name.startswith(_OWN), family.name
        # Label names are private attributes: of the collector for plain metrics, of the family for custom collectors.
        labels: Iterable[str] = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(MetricRow(name, family.type, tuple(labels), family.documentation))
    return rows


if __name__ == "__main__":
    PAGE.write_text(page_with_metrics(PAGE.read_text("utf-8")), "utf-8")
