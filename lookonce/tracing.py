"""The product's spans, made with OpenTelemetry's API, which does nothing in a process without a tracer provider.

`start` gives a service a tracer provider; an application that uses the SDK sets its own. This module adds to the API:

- A provider of our own beside the global one. The global one can be set only once, and libraries would add their own
  spans to it.
- `serving` and `calling` may begin a trace. `span`, `redis_span` and `record` only continue one, so background work
  starts no traces.
- An error is recorded by the name of its type. The API would record its message, which may quote a user.
- `ended_by`, because a stream's span outlives every block in which it is current.

Attributes are numbers, our own names and request ids: never a text, a pixel, a digest or the message of an exception.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode

from lookonce.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Value: TypeAlias = str | int | float | bool
Metadata: TypeAlias = tuple[tuple[str, str], ...]
"""Key and value of each entry, as gRPC takes them."""

SpanBlock: TypeAlias = AbstractContextManager[trace.Span]
"""A block in which a span is the current one."""

NO_SPAN: SpanBlock = nullcontext(trace.INVALID_SPAN)
"""A block without a span of its own."""

_SCOPE = "lookonce"
_TRACEPARENT = "traceparent"
_REQUEST_ID = "lookonce.request_id"
_EXPORTERS = "opentelemetry_traces_exporter"
# Codes that mean a fault of the server, by OpenTelemetry's conventions for gRPC.
_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

_log = logging.getLogger(__name__)


def span(name: str, **attributes: Value) -> SpanBlock:
    """Starts a child of the current span. It is current inside the block and ends with it. No span outside a trace."""
    return _block(_tracer().start_span(name, attributes=_prefixed(attributes))) if _is_in_trace() else NO_SPAN


def redis_span(operation: str, **sizes: int) -> SpanBlock:
    """Starts a child of the current span for one operation of the shared cache. No span outside a trace."""
    if not _is_in_trace():
        return NO_SPAN
    attributes = {"db.system.name": "redis", "db.operation.name": operation, **_prefixed(sizes)}
    return _block(_tracer().start_span(f"redis.{operation}", kind=SpanKind.CLIENT, attributes=attributes))


def annotate(**attributes: Value) -> None:
    """Adds attributes to the current span; their names get the prefix `lookonce.`"""
    current_span = trace.get_current_span()
    if current_span.is_recording():
        current_span.set_attributes(_prefixed(attributes))


def record(name: str, started_s: float, ended_s: float, **attributes: Value) -> None:
    """Records a child of the current span that has already ended. Both times are readings of the monotonic clock."""
    if not _is_in_trace():
        return
    # The clocks are compared once: a pause between two comparisons would change the span's length.
    started_ns = _clock_ns(started_s)
    made = _tracer().start_span(name, attributes=_prefixed(attributes), start_time=started_ns)
    made.end(started_ns + max(0, int((ended_s - started_s) * 1e9)))


def serving(
    method: str, metadata: Iterable[tuple[str, str | bytes]], request_id: str, arrived_s: float | None = None
) -> SpanBlock:
    """Starts the span of an incoming call, current inside the block. `method` is /service/name.

    `arrived_s` is the monotonic clock's reading at which the span starts; None: now.

    The span joins the caller's trace if the metadata name one. Call `answered` before the block ends.
    """
    # Without a provider the API would pass the caller's trace on, and log lines would name spans that nobody exports.
    if not _makes_spans():
        return NO_SPAN
    # With several `traceparent` headers none counts, by W3C's specification. The propagator would get the last one.
    pairs = [(key, value) for key, value in metadata if isinstance(value, str)]
    is_ambiguous = sum(key == _TRACEPARENT for key, _ in pairs) > 1
    carrier = {} if is_ambiguous else dict(pairs)
    name = method.strip("/")
    attributes = {"rpc.system.name": "grpc", "rpc.method": name, _REQUEST_ID: request_id}
    parent = propagate.extract(carrier, Context())
    start_ns = None if arrived_s is None else _clock_ns(arrived_s)
    started = _tracer().start_span(name, parent, SpanKind.SERVER, attributes, start_time=start_ns)
    return trace.use_span(started, end_on_exit=True, record_exception=False, set_status_on_exception=False)


def answered(serving_span: trace.Span, code: str, request_id: str | None) -> None:
    """Sets the gRPC status and the final request id of an incoming call.

    A status that means a fault of the server marks the span as failed.
    """
    serving_span.set_attribute("rpc.response.status_code", code)
    if request_id is not None:
        serving_span.set_attribute(_REQUEST_ID, request_id)
    if code in _SERVER_FAULTS:
        _fail(serving_span, code)


def calling(name: str) -> SpanBlock:
    """Starts the span of one call of the SDK with all its requests. Current inside the block, ends with it."""
    return _block(start_call(name))


def start_call(name: str) -> trace.Span:
    """Starts the span of one call of the SDK. It is not current, and the caller must `end` it."""
    return _tracer().start_span(name, kind=SpanKind.CLIENT, attributes={"rpc.system.name": "grpc"})


def current(span: trace.Span) -> SpanBlock:
    """Makes `span` the current one inside a block, which does not end it."""
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def end(span: trace.Span, error: BaseException | None = None) -> None:
    """Ends a span, with the type of `error` if there is one. A second call has no effect."""
    if not span.is_recording():
        return
    if error is not None:
        _fail(span, type(error).__name__)
    span.end()


@contextmanager
def ended_by(span: trace.Span, usual: type[BaseException]) -> Iterator[None]:
    """Ends the span when the block raises; an exception of type `usual` is not recorded as an error."""
    try:
        yield
    except BaseException as error:
        end(span, None if isinstance(error, usual) else error)
        raise


def metadata() -> Metadata:
    """Returns the metadata with which a call joins the current trace (W3C's `traceparent`); empty outside a trace."""
    if not _is_in_trace():
        return ()
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


def trace_id() -> str | None:
    """Returns the id of the current trace, 32 hex digits; None outside a trace."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def start(service: str, exporters: Sequence[str]) -> None:
    """Makes this process export its spans. `service` is its name unless OTEL_SERVICE_NAME sets another.

    `exporters` are names under which OpenTelemetry's exporters are registered, such as "otlp_proto_grpc"; an empty
    list turns traces off. OpenTelemetry reads all other settings from its standard variables. A provider that the
    process already has stays. Raises ConfigurationError for an exporter that is not installed; logs a warning if
    OpenTelemetry's SDK is not installed.
    """
    if _makes_spans():
        return
    _own.is_off = not exporters
    if _own.is_off:
        return
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        _log.warning("OTEL_ variables ask for traces, but lookonce[otel] is not installed; no traces are made")
        return
    resource = Resource.create().merge(Resource({"service.name": service})).merge(OTELResourceDetector().detect())
    # The provider shuts down when the process exits, and exports the spans it still holds.
    provider = TracerProvider(resource=resource)
    for name in exporters:
        found = next(iter(importlib.metadata.entry_points(group=_EXPORTERS, name=name)), None)
        if found is None:
            raise ConfigurationError(
                f"OTEL_TRACES_EXPORTER: no exporter {name} is installed; lookonce[otel] installs otlp"
            )
        provider.add_span_processor(BatchSpanProcessor(found.load()()))
    _own.provider = provider
    _log.info("traces are exported by %s", ", ".join(exporters))


def stop() -> None:
    """Exports the remaining spans and undoes `start`."""
    provider, _own.provider, _own.is_off = _own.provider, None, False
    if provider is not None:
        provider.shutdown()


class _Own:
    """The provider that `start` chose for this process."""

    provider: TracerProvider | None = None
    # No spans, even if the process has a global provider.
    is_off = False


_own = _Own()
_NO_PROVIDER = trace.NoOpTracerProvider()


def _provider() -> trace.TracerProvider:
    """The provider of `start`, otherwise the global one."""
    if _own.is_off:
        return _NO_PROVIDER
    return trace.get_tracer_provider() if _own.provider is None else _own.provider


def _makes_spans() -> bool:
    """Tells whether the process has a provider other than the API's placeholders."""
    return not isinstance(_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)


def _tracer() -> trace.Tracer:
    return _tracer_of(_provider())


@functools.lru_cache(maxsize=1)
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    return provider.get_tracer(_SCOPE)


def _clock_ns(at_s: float) -> int:
    """Converts a past reading of the monotonic clock, seconds, to the time of day, nanoseconds."""
    return time.time_ns() - int((time.monotonic() - at_s) * 1e9)


def _is_in_trace() -> bool:
    return trace.get_current_span().get_span_context().is_valid


@contextmanager
def _block(span: trace.Span) -> Iterator[trace.Span]:
    """Makes a span current inside a block that ends it."""
    with current(span):
        try:
            yield span
        except BaseException as error:
            end(span, error)
            raise
        end(span)


def _fail(span: trace.Span, error_type: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)


def _prefixed(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"lookonce.{name}": value for name, value in attributes.items()}
