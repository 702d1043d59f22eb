"""A collector of traces on loopback, which keeps the spans that OpenTelemetry's exporters send over gRPC."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from lookonce import tracing
from lookonce.server.settings import TracingVariables


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """One span that the collector received."""

    # service.name of the exporting process.
    service: str
    name: str
    # "SERVER", "CLIENT" or "INTERNAL".
    kind: str
    # Hex digits, in the format of logs.
    trace_id: str
    span_id: str
    # Empty for a root span.
    parent_id: str
    attributes: dict[str, Any]
    is_error: bool
    # Readings of the wall clock.
    started_ns: int
    ended_ns: int
    # The whole span as text, to search for content that must not be in it.
    text: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A gRPC service that keeps all received spans."""

    def __init__(self) -> None:
        self.target = ""
        self._lock = threading.Lock()
        self._spans: list[SeenSpan] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for group in request.resource_spans:
            service = _values(group.resource.attributes)["service.name"]
            with self._lock:
                self._spans += [_seen(service, span) for scope in group.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[SeenSpan]:
        """All received spans, by start time."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.started_ns)

    def named(self, name: str) -> list[SeenSpan]:
        """Returns the spans with this name, by start time."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> SeenSpan:
        """Returns the only span with this name."""
        (span,) = self.named(name)
        return span


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """Starts a collector and stops it after the block."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    collector.target = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


class Traces:
    """The spans that this process exports."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collected(self) -> Collector:
        """Stops the tracing, which exports the remaining spans, and returns the collector."""
        tracing.stop()
        return self._collector


@contextlib.contextmanager
def traced_process() -> Iterator[Traces]:
    """Exports this process' spans as the service "under-test", until the block or `collected` ends that."""
    with running_collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.target)
        tracing.start("under-test", TracingVariables().exporters)
        try:
            yield Traces(collector)
        finally:
            tracing.stop()


def _seen(service: str, span: trace_pb2.Span) -> SeenSpan:
    return SeenSpan(
        service=service,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        started_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        text=str(span),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
