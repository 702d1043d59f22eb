"""Prometheus metrics of the embedding rows that a decoder fetches, by their source."""

from __future__ import annotations

import enum

from prometheus_client import CollectorRegistry, Counter, Histogram

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class FetchTier(enum.Enum):
    """The source of fetched rows; the value is a metric label."""

    # Redis had the rows, so the encoder was not asked.
    SHARED = "shared"
    # The encoder was asked; it either encoded the image or had its rows.
    ENCODER = "encoder"


class FetchMetrics:
    """The metrics; create one instance per process and registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "lookonce_decoder_embedding_fetch_seconds",
            "Time from asking for rows to their arrival. shared: Redis had them; encoder: the encoder was asked.",
            labelnames=("tier",),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._rows = Counter(
            "lookonce_decoder_embedding_fetch_rows", "Rows that arrived.", labelnames=("tier",), registry=registry
        )
        self._bytes = Counter(
            "lookonce_decoder_embedding_fetch_bytes",
            "Bytes of rows that arrived.",
            labelnames=("tier",),
            registry=registry,
        )
        self._needed = Counter(
            "lookonce_decoder_embedding_fetch_rows_needed",
            "Rows that fetches were started for. Each is needed by a step and asked for once.",
            registry=registry,
        )
        self._failed = Counter(
            "lookonce_decoder_embedding_fetch_failed", "Fetches that ended with an error.", registry=registry
        )
        for tier in FetchTier:
            for metric in (self._seconds, self._rows, self._bytes):
                metric.labels(tier.value)

    def begun(self, num_rows: int) -> None:
        """Counts a fetch that starts."""
        self._needed.inc(num_rows)

    def arrived(self, tier: FetchTier, num_rows: int, num_bytes: int, seconds: float) -> None:
        """Counts a fetch that succeeded."""
        self._seconds.labels(tier.value).observe(seconds)
        self._rows.labels(tier.value).inc(num_rows)
        self._bytes.labels(tier.value).inc(num_bytes)

    def failed(self) -> None:
        """Counts a fetch that failed."""
        self._failed.inc()
