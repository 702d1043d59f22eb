"""Prometheus metrics of LoRA adapters. Operators name adapters; a name is a label only while its adapter is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from decoder_svc.scheduling.request_output import RequestUsage


@dataclass(slots=True)
class _Sums:
    """The requests of one adapter that ended."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class AdapterMetrics(Collector):
    """Counts the requests of each adapter that is loaded. Thread-safe."""

    def __init__(self, registry: CollectorRegistry, names: Callable[[], Sequence[str]]) -> None:
        """`names` returns the adapters that requests may name; it is called on the scraping thread, too."""
        self._names = names
        self._lock = threading.Lock()
        self._sums: dict[str, _Sums] = {}
        registry.register(self)

    def observe(self, name: str, usage: RequestUsage) -> None:
        """Counts a request that ended, with an answer or without. No effect without a name, or if it is unloaded."""
        if not name:
            return
        with self._lock:
            self._forget_unloaded()
            if (sums := self._sums.get(name)) is not None:
                sums.requests += 1
                sums.prompt_tokens += usage.prompt_tokens
                sums.generated_tokens += usage.completion_tokens

    def collect(self) -> Iterator[Metric]:
        """Yields the families; the registry calls it at every scrape."""
        with self._lock:
            self._forget_unloaded()
            sums = {
                name: (each.requests, each.prompt_tokens, each.generated_tokens) for name, each in self._sums.items()
            }
        yield GaugeMetricFamily("lookonce_decoder_adapters", "LoRA adapters that requests may name.", value=len(sums))
        families = (
            ("lookonce_decoder_adapter_requests", "Requests that ended, by the LoRA adapter that they named."),
            ("lookonce_decoder_adapter_prompt_tokens", "Prompt tokens of requests with this LoRA adapter."),
            ("lookonce_decoder_adapter_generated_tokens", "Tokens that were generated with this LoRA adapter."),
        )
        for index, (family_name, meaning) in enumerate(families):
            family = CounterMetricFamily(family_name, meaning, labels=("adapter",))
            for name, values in sums.items():
                family.add_metric((name,), values[index])
            yield family

    def _forget_unloaded(self) -> None:
        """Makes the sums those of the loaded adapters. One that comes back begins at zero."""
        self._sums = {name: self._sums.get(name) or _Sums() for name in self._names()}
