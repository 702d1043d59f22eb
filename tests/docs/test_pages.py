"""What the documentation says of files, links and metrics holds."""

from __future__ import annotations

import pathlib
import re
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from decoder_svc.engine_interface import Engine, EngineCounters, EngineLoad
from decoder_svc.fetch_metrics import FetchMetrics
from decoder_svc.metrics import DecoderMetrics
from encoder_svc.metrics import EncoderMetrics
from lookonce.embedding_store import EmbeddingStore
from lookonce.interceptors import CallMetrics
from lookonce.store_metrics import StoreCollector

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
_PATH = re.compile(r"`((?:lookonce|encoder_svc|decoder_svc|tests|benchmarks|protos|k8s|docs)/[\w./-]*)`")
_LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
_METRIC = re.compile(r"`(lookonce_[a-z0-9_]+)` \|")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_named_files_exist(page: pathlib.Path) -> None:
    for name in _PATH.findall(page.read_text("utf-8")):
        assert (ROOT / name).exists(), name


@pages
def test_relative_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in _LINK.findall(page.read_text("utf-8")):
        assert ":" in target or (page.parent / target).exists(), target


def test_exactly_the_exported_metrics_are_described() -> None:
    described = _METRIC.findall((ROOT / "docs/operations.md").read_text("utf-8"))
    assert sorted(described) == sorted(_exported())


class _EngineAtRest:
    """As much of an engine as the gauges ask for; a real one needs a model to have the same names."""

    attention_backend = "none"

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0.0, 0)

    def counters(self) -> EngineCounters:
        return EngineCounters(0, 0, 0)


def _exported() -> set[str]:
    """Names as Prometheus stores them, of everything of ours that both services register."""
    registry = CollectorRegistry()
    CallMetrics(registry)
    EncoderMetrics(registry)
    FetchMetrics(registry)
    DecoderMetrics(registry).watch(cast(Engine, _EngineAtRest()))
    store = EmbeddingStore("unix:///nowhere", budget_s=0.1, ttl_s=1, max_entry_bytes=4096)
    for service in ("encoder", "decoder"):
        registry.register(StoreCollector(store, service))
    names = {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in registry.collect()}
    store.close()
    return names
