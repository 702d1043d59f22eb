"""Spans of OpenTelemetry, or nothing where nobody has asked for traces. Never imports OpenTelemetry unless asked to.

A service asks by `start`, an application that uses the SDK by having set a tracer provider. Without either every
function here costs a look into a dictionary. `serving` and `calling` may begin a trace; `span`, `redis_span` and
`record` only continue one, so that what a process does by itself makes none. Attributes are numbers, names of ours and
request ids: never a text, a pixel, a digest or the words of an exception.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from lookonce.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

Value: TypeAlias = str | int | float | bool
Metadata: TypeAlias = tuple[tuple[str, str], ...]
"""Key and value of each entry, as gRPC takes them."""

_Kind = Literal["INTERNAL", "SERVER", "CLIENT"]

_SCOPE = "lookonce"
_EXPORTERS = "opentelemetry_traces_exporter"
# Codes that say that the server is at fault, by OpenTelemetry's conventions for gRPC.
_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

_log = logging.getLogger(__name__)


class Span:
    """One span, or none. As a context manager it is the current one in the block and ends with it."""

    __slots__ = ("_block", "_is_answered", "_span")

    def __init__(self, span: trace.Span | None) -> None:
        self._span = span
        self._block: AbstractContextManager[object] = nullcontext()
        self._is_answered = False

    def set(self, **attributes: Value) -> None:
        """Adds attributes; their names get the prefix `lookonce.`"""
        if self._span is not None:
            self._span.set_attributes(_prefixed(attributes))

    def answered(self, code: str) -> None:
        """The call that a server's span is about ended with this gRPC status, which says whether that is an error."""
        if self._span is None:
            return
        self._is_answered = True
        self._span.set_attribute("rpc.response.status_code", code)
        if code in _SERVER_FAULTS:
            self._fail(code)

    def current(self) -> AbstractContextManager[object]:
        """Makes it the current span in a block, which does not end it."""
        if self._span is None:
            return nullcontext()
        from opentelemetry import trace

        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    def end(self, error: BaseException | None = None) -> None:
        """Ends it, with the error's type where there is one; the first time counts."""
        if self._span is None or not self._span.is_recording():
            return
        if error is not None and not self._is_answered:
            self._fail(type(error).__name__)
        self._span.end()

    @contextmanager
    def ended_by(self, usual: type[BaseException]) -> Iterator[None]:
        """Ends it when the block raises, which with an exception of this type is not an error."""
        try:
            yield
        except BaseException as error:
            self.end(None if isinstance(error, usual) else error)
            raise

    def __enter__(self) -> Self:
        if self._span is not None:
            self._block = self.current()
            self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span is not None:
            self._block.__exit__(None, None, None)
            self.end(error)

    def _fail(self, error_type: str) -> None:
        from opentelemetry.trace import StatusCode

        assert self._span is not None, "asked by the callers"
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(StatusCode.ERROR)


NO_SPAN = Span(None)


def span(name: str, **attributes: Value) -> Span:
    """A part of what the current span is about."""
    return _started(name, "INTERNAL", _prefixed(attributes)) if trace_id() is not None else NO_SPAN


def redis_span(operation: str, **sizes: int) -> Span:
    """One operation of the shared cache, as a part of what the current span is about."""
    if trace_id() is None:
        return NO_SPAN
    names = {"db.system.name": "redis", "db.operation.name": operation}
    return _started(f"redis.{operation}", "CLIENT", {**names, **_prefixed(sizes)})


def annotate(**attributes: Value) -> None:
    """Adds attributes to the current span."""
    if trace_id() is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(_prefixed(attributes))


def record(name: str, started_s: float, ended_s: float, **attributes: Value) -> None:
    """A part of the current span that is over already; both times are those of the monotonic clock."""
    if trace_id() is None:
        return
    now_s, now_ns = time.monotonic(), time.time_ns()
    started_ns, ended_ns = (now_ns - int((now_s - at_s) * 1e9) for at_s in (started_s, ended_s))
    made = _started(name, "INTERNAL", _prefixed(attributes), start_time=started_ns)
    assert made._span is not None, "there is a current span"
    made._span.end(max(started_ns, ended_ns))


def serving(method: str, metadata: Iterable[tuple[str, str | bytes]], request_id: str) -> Span:
    """A call that came in, in its caller's trace where the metadata names one; `method` is /service/name."""
    if _tracer() is None:
        return NO_SPAN
    from opentelemetry import propagate
    from opentelemetry.context import Context

    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    name = method.strip("/")
    names = {"rpc.system.name": "grpc", "rpc.method": name, "lookonce.request_id": request_id}
    return _started(name, "SERVER", names, context=propagate.extract(carrier, Context()))


def calling(name: str) -> Span:
    """A call of the SDK with all that it asks servers for; not the current span until it is entered."""
    return _started(name, "CLIENT", {"rpc.system.name": "grpc"})


def metadata() -> Metadata:
    """What a call carries so that the server's spans join the current one's trace."""
    if trace_id() is None:
        return ()
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


def trace_id() -> str | None:
    """32 hex digits: the trace that this task works for; None without one."""
    if _tracer() is None:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def start(service: str, exporters: Sequence[str]) -> None:
    """Makes this process export its spans; `service` is its name unless OTEL_SERVICE_NAME says another one.

    `exporters` are names that OpenTelemetry's exporters have registered, such as "otlp_proto_grpc"; none: there will
    be no traces. All else is read from the standard variables. A provider that the process has already stays.
    Raises ConfigurationError for an exporter that is not installed; where OpenTelemetry is not, it only warns.
    """
    if _tracer() is not None:
        return
    _own.is_off = not exporters
    if _own.is_off:
        return
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        _log.warning("traces are asked for by OTEL_ variables, but are not made: lookonce[otel] is not installed")
        return
    resource = Resource.create().merge(Resource({"service.name": service})).merge(OTELResourceDetector().detect())
    # Ends by itself, exporting what it still holds, when the process does.
    provider = TracerProvider(resource=resource)
    for name in exporters:
        found = next(iter(importlib.metadata.entry_points(group=_EXPORTERS, name=name)), None)
        if found is None:
            raise ConfigurationError(f"OTEL_TRACES_EXPORTER: no exporter {name} is installed; lookonce[otel] has otlp")
        provider.add_span_processor(BatchSpanProcessor(found.load()()))
    _own.provider = provider
    _log.info("traces are exported by %s", ", ".join(exporters))


def stop() -> None:
    """Exports what is left and undoes `start`."""
    provider, _own.provider, _own.is_off = _own.provider, None, False
    if provider is not None:
        provider.shutdown()


class _Own:
    """What `start` did."""

    provider: TracerProvider | None = None
    # No traces, whatever else there is in the process.
    is_off = False


_own = _Own()


def _tracer() -> trace.Tracer | None:
    if _own.provider is not None:
        return _tracer_of(_own.provider)
    if _own.is_off or "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    # Of a process in which some library has imported OpenTelemetry and nobody has set it up.
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return _tracer_of(provider)


@functools.lru_cache(maxsize=1)
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    return provider.get_tracer(_SCOPE)


def _started(
    name: str,
    kind: _Kind,
    attributes: Mapping[str, Value],
    *,
    context: Context | None = None,
    start_time: int | None = None,
) -> Span:
    """A child of the current span, or of `context`'s where that is given."""
    tracer = _tracer()
    if tracer is None:
        return NO_SPAN
    from opentelemetry.trace import SpanKind

    return Span(tracer.start_span(name, context, SpanKind[kind], attributes, start_time=start_time))


def _prefixed(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"lookonce.{name}": value for name, value in attributes.items()}
