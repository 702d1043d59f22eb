"""The encoder service's metrics. Labels are bounded: never a digest or a request id."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lookonce.status_codes import STATUS_TABLE

_STORE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_FORWARD_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_RELATIVE_ERROR_BUCKETS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.012, 0.015, 0.02, 0.03, 0.05, 0.1)


class CacheMetrics:
    """Metrics of the cache's tiers and of writes to them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.cache_queries = Counter(
            "lookonce_encoder_cache_queries_total",
            "Look-ups in a tier of the cache: local (this process) or shared.",
            ["tier"],
            registry=registry,
        )
        self.cache_hits = Counter(
            "lookonce_encoder_cache_hits_total", "Look-ups that found rows.", ["tier"], registry=registry
        )
        self.store_seconds = Histogram(
            "lookonce_encoder_store_seconds",
            "Time to write one embedding to the shared cache.",
            buckets=_STORE_BUCKETS_S,
            registry=registry,
        )
        self.unstored = Counter(
            "lookonce_encoder_unstored_total", "Embeddings that the shared cache did not take.", registry=registry
        )
        self.not_worth_storing = Counter(
            "lookonce_encoder_not_worth_storing_total",
            "Embeddings over 1 MiB that would take longer to read than to encode again, and were not stored.",
            registry=registry,
        )
        self.local_cache_bytes = Gauge(
            "lookonce_encoder_local_cache_bytes", "Bytes of rows kept in this process.", registry=registry
        )
        self.local_cache_entries = Gauge(
            "lookonce_encoder_local_cache_entries", "Images whose rows are kept in this process.", registry=registry
        )
        self.int8_relative_error = Histogram(
            "lookonce_encoder_int8_relative_error",
            "With row_format int8: norm of the rounding error of an image's rows, divided by the norm of the rows.",
            buckets=_RELATIVE_ERROR_BUCKETS,
            registry=registry,
        )


class ForwardMetrics:
    """Metrics of the forward thread and its passes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.encodes = Counter(
            "lookonce_encoder_encodes_total", "Images that went through the model.", registry=registry
        )
        self.forward_seconds = Histogram(
            "lookonce_encoder_forward_seconds",
            "Time of one forward pass.",
            buckets=_FORWARD_BUCKETS_S,
            registry=registry,
        )
        self.forward_images = Histogram(
            "lookonce_encoder_forward_images", "Images in one forward pass.", buckets=_BATCH_BUCKETS, registry=registry
        )
        self.forward_running_seconds = Gauge(
            "lookonce_encoder_forward_running_seconds",
            "Age of the running forward pass; 0 when there is none.",
            registry=registry,
        )
        self.batch_wait_seconds = Histogram(
            "lookonce_encoder_batch_wait_seconds",
            "Time from the end of an image's preprocessing to the start of its forward pass.",
            buckets=_FORWARD_BUCKETS_S,
            registry=registry,
        )
        self.weight_bytes = Gauge(
            "lookonce_encoder_weight_bytes",
            "Bytes that the vision half's weights take on the device.",
            registry=registry,
        )
        self.model_faults = Counter(
            "lookonce_encoder_model_faults_total",
            "Passes that failed for lack of memory, or after which the model also failed on a known good picture; "
            "no image is held responsible.",
            registry=registry,
        )


class EncoderMetrics(CacheMetrics, ForwardMetrics):
    """All metrics of the encoder. One instance per process and registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        CacheMetrics.__init__(self, registry)
        ForwardMetrics.__init__(self, registry)
        self.coalesced = Counter(
            "lookonce_encoder_coalesced_total",
            "Requests that joined an encode in this process (process) or waited for another replica's (fleet).",
            ["scope"],
            registry=registry,
        )
        self.lease_takeovers = Counter(
            "lookonce_encoder_lease_takeovers_total",
            "Encodes begun here after another replica's lease had ended without rows.",
            registry=registry,
        )
        self.rejected = Counter(
            "lookonce_encoder_rejected_total",
            "Images answered with an error, or without rows that were asked for, by the reason; OVERLOADED means that "
            "the queue or the memory was full.",
            ["reason"],
            registry=registry,
        )
        for row in STATUS_TABLE:
            self.rejected.labels(row.reason)
        self.poisonous = Counter(
            "lookonce_encoder_poisonous_total",
            "Images that killed their decoding process (decode), or on which alone the model failed (forward).",
            ["stage"],
            registry=registry,
        )
        self.quarantine_refused = Counter(
            "lookonce_encoder_quarantine_refused_total",
            "Images refused without an attempt because they had failed fatally twice.",
            ["stage"],
            registry=registry,
        )
        self.queued_images = Gauge(
            "lookonce_encoder_queued_images", "Images waiting for preprocessing or in the model.", registry=registry
        )
        self.queued_bytes = Gauge(
            "lookonce_encoder_queued_bytes",
            "Size of the files of images in all calls in progress, bytes.",
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "lookonce_encoder_queue_seconds",
            "Time from an image's admission to its rows without the forward pass: preprocessing and waiting.",
            buckets=_FORWARD_BUCKETS_S,
            registry=registry,
        )
