"""Spans exist if traces are enabled and only then. The tests use a real exporter over real gRPC."""

from __future__ import annotations

import asyncio
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import lookonce
from lookonce import tracing
from lookonce.content_key import DEFAULT_TENANT, EncoderFingerprint, ProcessorOptions, content_key, image_digest
from lookonce.errors import ConfigurationError, OverloadedError, UnavailableError
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.serving import GrpcService
from lookonce.server.settings import ServiceSettings, TracingVariables
from lookonce.server.telemetry import Telemetry, replace_request_id
from lookonce.store.embedding_store import EmbeddingStore
from tests.lookonce.sdk.sdk_servers import System, running_system
from tests.otlp_collector import Traces, traced_process

KINDS = "lookonce.test.v1.Kinds"
STREAM = "lookonce.decoder.v1.DecoderService/GenerateStream"

# W3C Trace Context: version, trace, span, and a flag for a recorded trace.
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORDED = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
NOT_RECORDED = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00"),)


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced_process() as started:
        yield started


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as started:
        yield started


# Enabling and disabling traces.


@pytest.mark.parametrize(
    ("variables", "exporters"),
    [
        ({}, ()),
        ({"SERVICE_NAME": "x", "EXPORTER_OTLP_PROTOCOL": "grpc"}, ()),
        ({"EXPORTER_OTLP_ENDPOINT": "http://there:4317"}, ("otlp_proto_grpc",)),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "http://there:4317"}, ("otlp_proto_grpc",)),
        ({"TRACES_EXPORTER": "otlp"}, ("otlp_proto_grpc",)),
        ({"TRACES_EXPORTER": "OTLP, console"}, ("otlp_proto_grpc", "console")),
        ({"TRACES_EXPORTER": "otlp", "EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ("otlp_proto_http",)),
        ({"TRACES_EXPORTER": "none", "EXPORTER_OTLP_ENDPOINT": "http://there:4317"}, ()),
        ({"TRACES_EXPORTER": "otlp", "SDK_DISABLED": "True"}, ()),
        ({"TRACES_EXPORTER": "otlp", "SDK_DISABLED": "false"}, ("otlp_proto_grpc",)),
    ],
)
def test_the_standard_variables_select_the_exporters(
    variables: dict[str, str], exporters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    assert TracingVariables().exporters == exporters


@pytest.mark.parametrize("module", ["lookonce", "lookonce.client", "lookonce.aio", "lookonce.server.interceptors"])
def test_only_the_api_of_opentelemetry_is_imported_by(module: str) -> None:
    """The SDK and the exporters are imported only by a process that exports."""
    heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
    program = f"import sys, {module}; print(*(name for name in sys.modules if name.startswith({heavy!r})))"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert listed.split() == []


def test_without_a_tracer_there_is_no_span() -> None:
    with tracing.serving("/a/b", RECORDED, "r"), tracing.calling("c") as call, tracing.span("s") as span:
        assert not call.get_span_context().is_valid
        assert not span.get_span_context().is_valid
        assert tracing.trace_id() is None
        assert tracing.metadata() == ()
        assert tracing.span("s") is tracing.NO_SPAN
        assert tracing.redis_span("stat") is tracing.NO_SPAN


def test_an_exporter_that_is_not_installed_keeps_the_service_from_starting() -> None:
    with pytest.raises(ConfigurationError, match="no exporter zipkin is installed"):
        tracing.start("under-test", ("zipkin",))
    assert tracing.trace_id() is None


def test_without_the_extra_a_service_starts_and_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    tracing.start("under-test", ("otlp_proto_grpc",))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "lookonce[otel] is not installed" in caplog.text
    assert not tracing.start_call("c").is_recording()


def test_the_service_has_a_name_unless_the_variables_give_another(
    traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracing.calling("ours"):
        pass
    tracing.stop()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chosen")
    tracing.start("under-test", TracingVariables().exporters)
    with tracing.calling("theirs"):
        pass
    collected = traces.collected()
    assert (collected.one("ours").service, collected.one("theirs").service) == ("under-test", "chosen")


def test_a_service_without_exporters_makes_no_span_even_if_a_library_sets_a_provider() -> None:
    """Runs in a new process, since a provider can be set only once."""
    program = """
from lookonce import tracing
tracing.start("service", ())
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
assert not tracing.start_call("call").is_recording()
tracing.stop()
assert tracing.start_call("call").is_recording()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Spans.


def test_only_calls_begin_a_trace(traces: Traces) -> None:
    tracing.record("lonely.record", 0.0, 1.0)
    with tracing.span("lonely"), tracing.redis_span("ping"):
        tracing.annotate(outcome="ok")
    with tracing.calling("call"), tracing.span("part", num_rows=3) as part:
        part.set_attribute("lookonce.tier", "shared")
        tracing.annotate(outcome="ok")
    collected = traces.collected()
    assert [span.name for span in collected.spans] == ["call", "part"]
    part_span = collected.one("part")
    assert (part_span.parent_id, part_span.kind) == (collected.one("call").span_id, "INTERNAL")
    assert part_span.attributes == {"lookonce.num_rows": 3, "lookonce.tier": "shared", "lookonce.outcome": "ok"}


def test_an_error_is_recorded_by_its_type_alone(traces: Traces) -> None:
    with pytest.raises(OverloadedError), tracing.calling("call"), tracing.span("part"):
        raise OverloadedError("a private word")
    collected = traces.collected()
    assert {span.name: span.attributes["error.type"] for span in collected.spans} == {
        "call": "OverloadedError",
        "part": "OverloadedError",
    }
    assert all(span.is_error and "private" not in span.text for span in collected.spans)


def test_an_ended_part_is_recorded_with_its_own_times(traces: Traces) -> None:
    now_s, before_ns = time.monotonic(), time.time_ns()
    with tracing.calling("call"):
        tracing.record("waited", now_s - 20, now_s - 5, num_rows=1)
    span = traces.collected().one("waited")
    assert span.ended_ns - span.started_ns == pytest.approx(15e9, abs=10)
    assert span.started_ns < span.ended_ns < before_ns


def test_an_unrecorded_trace_stays_unrecorded_and_is_passed_on(traces: Traces) -> None:
    with tracing.serving("/a/b", NOT_RECORDED, "r"), tracing.span("part"):
        ((name, parent),) = tracing.metadata()
    assert traces.collected().spans == []
    assert name == "traceparent"
    assert (parent[3:35], parent[-2:]) == (TRACE_ID, "00")


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", f"00-{'0' * 32}-{SPAN_ID}-01", "x" * 5000])
def test_a_broken_parent_starts_a_new_trace(header: str, traces: Traces) -> None:
    with tracing.serving("/a/b", (("traceparent", header), ("some-bin", b"\x00")), "r"):
        pass
    span = traces.collected().one("a/b")
    assert (span.parent_id, span.trace_id != TRACE_ID) == ("", True)


def test_several_parents_start_a_new_trace(traces: Traces) -> None:
    with tracing.serving("/a/b", (*RECORDED, *RECORDED), "r"):
        pass
    span = traces.collected().one("a/b")
    assert (span.parent_id, span.trace_id != TRACE_ID) == ("", True)


def test_an_operation_of_the_store_has_its_outcome_and_size(traces: Traces, tmp_path: pathlib.Path) -> None:
    store = EmbeddingStore(f"unix://{tmp_path}/nobody.sock", 0.2, 60, 1 << 20)
    key = content_key(image_digest(b"image"), EncoderFingerprint("f" * 64), ProcessorOptions(), DEFAULT_TENANT)
    with tracing.calling("call"):
        assert store.stat(key) is None
        assert store.read_rows(key, 0, 2, memoryview(bytearray(64))) is not None
        assert not store.touch(key)
    store.close()
    collected = traces.collected()
    spans = [span for span in collected.spans if span.name != "call"]
    assert [span.name for span in spans] == ["redis.stat", "redis.read_rows", "redis.touch"]
    counted = {outcome for _, outcome in store.stats.snapshot()}
    assert {span.attributes["lookonce.outcome"] for span in spans} <= counted
    assert collected.one("redis.read_rows").attributes["lookonce.num_bytes"] == 64
    assert all(span.kind == "CLIENT" and key.digest.hex()[:8] not in span.text for span in spans)


# Servers.


OWN_ID_KEY = "x-own-id"


async def _answer(request: Any, context: Any) -> bytes:
    await _read(request)
    _take_own_id(context)
    return (tracing.trace_id() or "").encode()


async def _answer_stream(request: Any, context: Any) -> AsyncIterator[bytes]:
    await _read(request)
    _take_own_id(context)
    yield (tracing.trace_id() or "").encode()


def _take_own_id(context: Any) -> None:
    """Gives the call the id that its metadata name for it, as a handler does whose request has an id of its own."""
    own_id = dict(context.invocation_metadata()).get(OWN_ID_KEY)
    if own_id is not None:
        replace_request_id(own_id)


async def _read(request: Any) -> None:
    """Reads a stream of requests to its end, since grpc.aio clients that still send report an error of their own."""
    if not isinstance(request, bytes):
        assert [message async for message in request] == [b""]


HANDLERS: dict[str, Any] = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler(_answer),
    "UnaryStream": grpc.unary_stream_rpc_method_handler(_answer_stream),
    "StreamUnary": grpc.stream_unary_rpc_method_handler(_answer),
    "StreamStream": grpc.stream_stream_rpc_method_handler(_answer_stream),
}


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """Returns a channel to a service that answers with its current trace id."""
    generic = grpc.method_handlers_generic_handler(KINDS, HANDLERS)
    entry = ServiceEntry(KINDS, lambda server: server.add_generic_rpc_handlers([generic]))
    values: dict[str, Any] = {"model": ".", "drain_timeout_s": 0.0}
    service = GrpcService(ServiceSettings(**values), Telemetry(), [entry])
    async with grpc.aio.insecure_channel(await service.start()) as opened:
        yield opened
    await service.stop()


async def _call(channel: grpc.aio.Channel, kind: str, *more_metadata: tuple[str, str]) -> bytes:
    """Calls a method by the RPC kind of its name and returns its only answer."""
    metadata = (*RECORDED, ("x-request-id", "turn-1"), *more_metadata)
    opened: dict[str, Any] = {
        "UnaryUnary": channel.unary_unary,
        "UnaryStream": channel.unary_stream,
        "StreamUnary": channel.stream_unary,
        "StreamStream": channel.stream_stream,
    }
    request = b"" if kind.startswith("Unary") else iter([b""])
    call = opened[kind](f"/{KINDS}/{kind}")(request, metadata=metadata, timeout=5)
    if kind.endswith("Unary"):
        return bytes(await call)
    (answer,) = [answer async for answer in call]
    return bytes(answer)


async def _access_line(log_lines: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """Waits for the only access line, since a caller may have its answer before, and returns it."""
    async with asyncio.timeout(60):
        while not (found := [line for line in log_lines() if line["event"] == "rpc"]):
            await asyncio.sleep(0.01)
    (line,) = found
    return line


@pytest.mark.parametrize("kind", HANDLERS)
async def test_a_call_of_each_kind_joins_its_callers_trace(
    kind: str, traces: Traces, channel: grpc.aio.Channel, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    assert await _call(channel, kind) == TRACE_ID.encode()
    span = (await asyncio.to_thread(traces.collected)).one(f"{KINDS}/{kind}")
    assert (span.trace_id, span.parent_id, span.kind) == (TRACE_ID, SPAN_ID, "SERVER")
    assert span.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": f"{KINDS}/{kind}",
        "rpc.response.status_code": "OK",
        "lookonce.request_id": "turn-1",
    }
    line = await _access_line(log_lines)
    assert (line["trace_id"], line["request_id"]) == (TRACE_ID, "turn-1")


@pytest.mark.parametrize("kind", HANDLERS)
async def test_the_span_has_the_id_that_the_handler_gave_to_the_call(
    kind: str, traces: Traces, channel: grpc.aio.Channel, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    await _call(channel, kind, (OWN_ID_KEY, "own"))
    span = (await asyncio.to_thread(traces.collected)).one(f"{KINDS}/{kind}")
    line = await _access_line(log_lines)
    assert span.attributes["lookonce.request_id"] == line["request_id"] == "own"


@pytest.mark.parametrize("kind", HANDLERS)
async def test_without_tracing_log_lines_have_no_trace_id(
    kind: str, channel: grpc.aio.Channel, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    assert await _call(channel, kind) == b""
    line = await _access_line(log_lines)
    assert line["request_id"] == "turn-1"
    assert "trace_id" not in line


async def test_health_leaves_no_span(traces: Traces, channel: grpc.aio.Channel) -> None:
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), metadata=RECORDED, timeout=5)
    assert (await asyncio.to_thread(traces.collected)).spans == []


async def test_a_refused_call_is_not_an_error_of_the_server_but_a_fault_is(traces: Traces, system: System) -> None:
    system.decoder.error_after_first_word = OverloadedError("no room")
    async with lookonce.AsyncClient.connect(system.decoder_target) as client:
        with pytest.raises(OverloadedError):
            [piece async for piece in client.stream("one two")]
        system.decoder.error_after_first_word = UnavailableError("going away")
        with pytest.raises(UnavailableError):
            [piece async for piece in client.stream("one two")]
    collected = await asyncio.to_thread(traces.collected)
    assert [(span.attributes["rpc.response.status_code"], span.is_error) for span in collected.named(STREAM)] == [
        ("RESOURCE_EXHAUSTED", False),
        ("UNAVAILABLE", True),
    ]
    assert [span.attributes["error.type"] for span in collected.named("client.stream")] == [
        "OverloadedError",
        "UnavailableError",
    ]


def test_stopping_the_tracing_ends_its_thread(traces: Traces) -> None:
    before = set(threading.enumerate())
    tracing.stop()
    # Threads of other tests may end meanwhile.
    assert "OtelBatchSpanRecordProcessor" in {thread.name for thread in before - set(threading.enumerate())}
