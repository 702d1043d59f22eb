"""The spans of both clients: one trace for all requests of a call, exported by a real exporter over real gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import lookonce
from lookonce.errors import LookonceError
from lookonce.sdk.messages import SMALL_IMAGE_BYTES
from tests.lookonce.sdk.sdk_servers import System, running_system
from tests.otlp_collector import Traces, traced_process

GENERATE = "lookonce.decoder.v1.DecoderService/Generate"
STREAM = "lookonce.decoder.v1.DecoderService/GenerateStream"
LARGE_IMAGE = b"\x07" * (SMALL_IMAGE_BYTES + 1)


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced_process() as started:
        yield started


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as started:
        yield started


class SyncCalls:
    """Calls `lookonce.Client`, each method in a thread."""

    def __init__(self, target: str) -> None:
        self._target = target

    async def run(self, name: str, *arguments: Any, **options: Any) -> None:
        def work() -> None:
            with lookonce.Client.connect(self._target) as client:
                result = getattr(client, name)(*arguments, **options)
                if name == "stream":
                    list(result)

        await asyncio.to_thread(work)

    async def read_one_and_leave(self) -> None:
        def work() -> None:
            with lookonce.Client.connect(self._target) as client, client.stream("one two three") as stream:
                next(stream)

        await asyncio.to_thread(work)


class AsyncCalls:
    """Calls `lookonce.AsyncClient` in the test's event loop."""

    def __init__(self, target: str) -> None:
        self._target = target

    async def run(self, name: str, *arguments: Any, **options: Any) -> None:
        async with lookonce.AsyncClient.connect(self._target) as client:
            result = getattr(client, name)(*arguments, **options)
            if name == "stream":
                [piece async for piece in result]
            else:
                await result

    async def read_one_and_leave(self) -> None:
        async with (
            lookonce.AsyncClient.connect(self._target) as client,
            client.stream("one two three") as stream,
        ):
            await anext(stream)


@pytest.fixture(params=[SyncCalls, AsyncCalls], ids=["sync", "async"])
def calls(request: pytest.FixtureRequest, system: System) -> Any:
    return request.param(system.decoder_target)


@pytest.mark.parametrize(("method", "served"), [("generate", GENERATE), ("stream", STREAM)])
async def test_all_requests_of_one_call_are_one_trace(method: str, served: str, calls: Any, traces: Traces) -> None:
    await calls.run(method, "what is it", images=[LARGE_IMAGE])
    collected = await asyncio.to_thread(traces.collected)
    root = collected.one(f"client.{method}")
    assert (root.parent_id, root.kind, root.is_error) == ("", "CLIENT", False)
    others = [span for span in collected.spans if span is not root and span.name != root.name]
    assert {(span.trace_id, span.parent_id) for span in others} == {(root.trace_id, root.span_id)}
    # The first request has the digest, the second the bytes.
    info = "lookonce.decoder.v1.DecoderService/GetModelInfo"
    assert sorted(span.name for span in others) == sorted([served, info, served])
    assert [span.attributes["rpc.response.status_code"] for span in collected.named(served)] == ["NOT_FOUND", "OK"]


@pytest.mark.parametrize("method", ["encode", "lookup"])
async def test_calls_to_encoders_are_traced_too(method: str, calls: Any, traces: Traces) -> None:
    await calls.run(method, [LARGE_IMAGE])
    collected = await asyncio.to_thread(traces.collected)
    root = collected.one(f"client.{method}")
    assert len(collected.spans) > 2
    assert all(span.parent_id == root.span_id for span in collected.spans if span.name != root.name)


async def test_a_stream_that_is_left_early_has_a_span_without_error(calls: Any, traces: Traces) -> None:
    await calls.read_one_and_leave()
    span = (await asyncio.to_thread(traces.collected)).one("client.stream")
    assert not span.is_error


@pytest.mark.parametrize("fault", [{"top_k": -1}, {"timeout_s": 1e-9}], ids=["value", "deadline"])
async def test_a_stream_that_cannot_begin_has_a_span_that_ends(fault: Any, calls: Any, traces: Traces) -> None:
    with pytest.raises(LookonceError) as caught:
        await calls.run("stream", "one", **fault)
    span = (await asyncio.to_thread(traces.collected)).one("client.stream")
    assert span.attributes["error.type"] == type(caught.value).__name__


async def test_a_stream_that_ends_with_its_client_has_a_span_with_an_error(system: System, traces: Traces) -> None:
    def work() -> None:
        client = lookonce.Client.connect(system.decoder_target)
        abandoned.append(client.stream("one two three"))
        next(abandoned[0])
        client.close()

    abandoned: list[Any] = []
    await asyncio.to_thread(work)
    client = lookonce.AsyncClient.connect(system.decoder_target)
    abandoned.append(client.stream("one two three"))
    await anext(abandoned[1])
    await client.aclose()
    spans = (await asyncio.to_thread(traces.collected)).named("client.stream")
    assert [span.attributes["error.type"] for span in spans] == ["AbortedError"] * 2


def test_an_applications_own_provider_is_used() -> None:
    """Runs in a new process, since a provider can be set only once."""
    program = """
from opentelemetry import trace
import lookonce
from lookonce import tracing
assert not tracing.start_call("too early").is_recording()
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with trace.get_tracer("application").start_as_current_span("page"):
    try:
        lookonce.Client.connect("127.0.0.1:1", timeout_s=5).generate("hello")
    except lookonce.errors.UnavailableError:
        pass
call, page = exporter.get_finished_spans()
print(call.name, call.parent.span_id == page.context.span_id, call.attributes["error.type"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (["client.generate", "True", "UnavailableError"], "")
