"""Counts of fetched rows by their source."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from decoder_svc.rows.fetch_metrics import FetchMetrics, FetchTier

PREFIX = "lookonce_decoder_embedding_fetch"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> FetchMetrics:
    return FetchMetrics(registry)


def test_every_source_is_exported_before_its_first_fetch(metrics: FetchMetrics, registry: CollectorRegistry) -> None:
    for tier in FetchTier:
        for name in ("rows_total", "bytes_total", "seconds_count"):
            assert registry.get_sample_value(f"{PREFIX}_{name}", {"tier": tier.value}) == 0


def test_a_fetch_counts_at_its_source_only(metrics: FetchMetrics, registry: CollectorRegistry) -> None:
    metrics.begun(5)
    metrics.arrived(FetchTier.ENCODER, 5, 640, 0.3)
    values = {
        (name, tier.value): registry.get_sample_value(f"{PREFIX}_{name}", {"tier": tier.value})
        for tier in FetchTier
        for name in ("rows_total", "bytes_total", "seconds_sum")
    }
    assert values == {
        ("rows_total", "shared"): 0,
        ("bytes_total", "shared"): 0,
        ("seconds_sum", "shared"): 0,
        ("rows_total", "encoder"): 5,
        ("bytes_total", "encoder"): 640,
        ("seconds_sum", "encoder"): 0.3,
    }


def test_a_failed_fetch_needed_rows_that_never_arrived(metrics: FetchMetrics, registry: CollectorRegistry) -> None:
    metrics.begun(7)
    metrics.failed()
    assert registry.get_sample_value(f"{PREFIX}_rows_needed_total") == 7
    assert registry.get_sample_value(f"{PREFIX}_failed_total") == 1
    assert registry.get_sample_value(f"{PREFIX}_rows_total", {"tier": "shared"}) == 0
