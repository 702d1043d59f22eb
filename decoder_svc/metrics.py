"""Prometheus metrics of the decoder service. Label values are bounded: never a digest, never a request id."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from decoder_svc.engine.core import EngineFacts
from decoder_svc.engine.figures import EngineCounters, EngineLoad
from decoder_svc.scheduling.request_output import RequestUsage

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class DecoderMetrics:
    """Counters and histograms of ended requests, and gauges of the engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ttft = Histogram(
            "lookonce_decoder_ttft_seconds",
            "Time from a request's arrival to its first generated token.",
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._queue = Histogram(
            "lookonce_decoder_queue_seconds",
            "Time from a request's arrival to the first step that computed one of its tokens.",
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "lookonce_decoder_prompt_tokens", "Prompt tokens, image tokens included.", registry=registry
        )
        self._cached_prompt_tokens = Counter(
            "lookonce_decoder_cached_prompt_tokens",
            "Prompt tokens whose keys and values the prefix cache had.",
            registry=registry,
        )
        self._generated_tokens = Counter("lookonce_decoder_generated_tokens", "Generated tokens.", registry=registry)
        self._image_rows = Counter(
            "lookonce_decoder_image_rows",
            "Embedding rows of prompts: encoded for the request, shared (in Redis, on the decoder already, or from an "
            "encode that another request counts), or skipped because the KV cache had their tokens.",
            labelnames=("tier",),
            registry=registry,
        )
        self._registry = registry
        for tier in ("encoded", "shared", "skipped"):
            self._image_rows.labels(tier)

    def watch(
        self,
        load: Callable[[], EngineLoad],
        counters: Callable[[], EngineCounters],
        facts: EngineFacts,
    ) -> None:
        """Adds the engine's metrics. `load` and `counters` are called at every scrape, on the scraping thread."""
        self._registry.register(_EngineCollector(counters))
        running = Gauge("lookonce_decoder_running_requests", "Requests in the running batch.", registry=self._registry)
        running.set_function(lambda: load().running_requests)
        waiting = Gauge(
            "lookonce_decoder_waiting_requests", "Requests that wait for admission.", registry=self._registry
        )
        waiting.set_function(lambda: load().waiting_requests)
        usage = Gauge(
            "lookonce_decoder_kv_cache_usage", "KV blocks in use over all blocks, 0..1.", registry=self._registry
        )
        usage.set_function(lambda: load().kv_cache_usage)
        rows = Gauge("lookonce_decoder_encoder_cache_rows", "Embedding rows on the device.", registry=self._registry)
        rows.set_function(lambda: load().encoder_cache_rows)
        blocked = Gauge(
            "lookonce_decoder_requests_waiting_for_rows",
            "Requests whose next token needs a row that had not arrived at the latest step.",
            registry=self._registry,
        )
        blocked.set_function(lambda: load().waiting_for_embeddings)
        backend = Gauge(
            "lookonce_decoder_attention_backend_info",
            "1 for the attention implementation in use: native, sdpa, triton or flash-attn. The log has the reason.",
            labelnames=("backend",),
            registry=self._registry,
        )
        backend.labels(facts.attention_backend).set(1)
        weights = Gauge(
            "lookonce_decoder_weight_bytes",
            "Bytes that the language model's weights take on the device.",
            registry=self._registry,
        )
        weights.set(facts.weight_bytes)
        if (engine_id := facts.process_id) is not None:
            # Processor time, memory and open files, as the service's own process has them.
            ProcessCollector("lookonce_decoder_engine", pid=lambda: engine_id, registry=self._registry)

    def observe(self, usage: RequestUsage) -> None:
        """Counts one request that ended, with an answer or without."""
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_prompt_tokens.inc(usage.cached_prompt_tokens)
        self._generated_tokens.inc(usage.completion_tokens)
        self._image_rows.labels("encoded").inc(usage.encoded_image_tokens)
        self._image_rows.labels("shared").inc(usage.cached_image_tokens)
        self._image_rows.labels("skipped").inc(usage.skipped_image_tokens)
        if usage.completion_tokens:
            self._queue.observe(usage.queue_time_s)
            self._ttft.observe(usage.time_to_first_token_s)


class _EngineCollector(Collector):
    """Exports the sums that the engine keeps itself."""

    def __init__(self, counters: Callable[[], EngineCounters]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yields one family per sum; the registry calls it at every scrape."""
        counters = self._counters()
        yield CounterMetricFamily(
            "lookonce_decoder_preemptions_total",
            "Requests that were put back into the queue because the KV pool was full.",
            value=counters.preemptions,
        )
        yield CounterMetricFamily(
            "lookonce_decoder_prefix_cache_query_tokens_total",
            "Tokens of admitted requests; admissions after a preemption are not counted.",
            value=counters.prefix_query_tokens,
        )
        yield CounterMetricFamily(
            "lookonce_decoder_prefix_cache_hit_tokens_total",
            "Tokens of admitted requests whose keys and values the prefix cache had.",
            value=counters.prefix_hit_tokens,
        )
        yield CounterMetricFamily(
            "lookonce_decoder_draft_tokens_total",
            "Draft tokens of prompt lookup that a step computed.",
            value=counters.draft_tokens,
        )
        yield CounterMetricFamily(
            "lookonce_decoder_accepted_draft_tokens_total",
            "Draft tokens that were accepted, each of which saved a step.",
            value=counters.accepted_draft_tokens,
        )
        yield CounterMetricFamily(
            "lookonce_decoder_stalls_total",
            "Times that no request could advance, so that all were restarted: a fault of the scheduler.",
            value=counters.stalls,
        )
        yield CounterMetricFamily(
            "lookonce_decoder_memory_errors_total",
            "Steps and images that failed for lack of memory. Their requests got RESOURCE_EXHAUSTED.",
            value=counters.memory_errors,
        )
