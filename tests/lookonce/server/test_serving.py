"""The server shell, against real servers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lookonce import errors, status_codes
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.server.serving import GrpcService, ServiceEntry
from lookonce.server.settings import MIB, ServiceSettings, parse_settings
from lookonce.server.telemetry import Telemetry
from tests.lookonce.server.serving_program import UnsupportedEncoder

ENCODER = "lookonce.encoder.v1.EncoderService"
KINDS = "lookonce.test.v1.Kinds"
SECRET = "/home/someone/secret.txt at 0x7f00deadbeef"
PROGRAM = [sys.executable, "-m", "tests.lookonce.server.serving_program"]
ROOT = pathlib.Path(__file__).parents[3]
Health = health_pb2.HealthCheckResponse
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]


class RaisingEncoder(UnsupportedEncoder):
    """GetEncoderInfo raises `error` where it is set; Encode answers one result per item."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.closed_generators = 0

    async def GetEncoderInfo(self, request: pb.GetEncoderInfoRequest, context: Any) -> pb.GetEncoderInfoResponse:
        if self.error is not None:
            raise self.error
        return pb.GetEncoderInfoResponse(model="test")

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        return pb.EncodeResponse(results=[pb.EncodeResult() for _ in request.items])

    async def ReadEmbedding(
        self, request: pb.ReadEmbeddingRequest, context: Any
    ) -> AsyncIterator[pb.ReadEmbeddingResponse]:
        try:
            yield pb.ReadEmbeddingResponse(row_offset=0)
            await asyncio.sleep(3600)
        finally:
            self.closed_generators += 1


def _kinds_handler(error: Exception) -> grpc.GenericRpcHandler:
    """One method of each kind that fails: unary ones at once, streaming ones after a message."""

    async def fail(request: Any, context: Any) -> bytes:
        raise error

    async def fail_later(request: Any, context: Any) -> AsyncIterator[bytes]:
        # grpc.aio clients report an error of their own when a call ends while they still send.
        if not isinstance(request, bytes):
            assert [message async for message in request] == [b""]
        yield b"first"
        raise error

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield bytes(MIB)

    handlers: dict[str, Any] = {
        "Flood": grpc.unary_stream_rpc_method_handler(flood),
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(fail),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(fail_later),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(fail),
        "StreamStream": grpc.stream_stream_rpc_method_handler(fail_later),
    }
    return grpc.method_handlers_generic_handler(KINDS, handlers)


class Running:
    """A started service and a channel to it."""

    def __init__(self, service: GrpcService, servicer: RaisingEncoder, telemetry: Telemetry) -> None:
        self.service = service
        self.servicer = servicer
        self.telemetry = telemetry
        self.channel = grpc.aio.insecure_channel(service.target, options=CHANNEL_OPTIONS)
        self.encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def health_of(self, name: str) -> Any:
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status


def _settings(**values: Any) -> ServiceSettings:
    return ServiceSettings(model=pathlib.Path("."), drain_timeout_s=values.pop("drain_timeout_s", 0.0), **values)


@contextlib.asynccontextmanager
async def _running(
    error: Exception | None = None, is_ready: Any = lambda: True, **settings: Any
) -> AsyncIterator[Running]:
    servicer, telemetry = RaisingEncoder(), Telemetry(settings.get("metrics_listen"))
    entries = [
        ServiceEntry(ENCODER, lambda server: pb_grpc.add_EncoderServiceServicer_to_server(servicer, server)),
        ServiceEntry(KINDS, lambda server: server.add_generic_rpc_handlers([_kinds_handler(error or ValueError())])),
    ]
    service = GrpcService(_settings(**settings), telemetry, entries, is_ready=is_ready)
    await service.start()
    running = Running(service, servicer, telemetry)
    try:
        yield running
    finally:
        await running.channel.close()
        await service.stop()


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.02)


def _example(kind: type[errors.LookonceError]) -> errors.LookonceError:
    if kind is errors.InvalidParameterError:
        return errors.InvalidParameterError("sampling.top_p", "must be in (0, 1], not 7")
    if kind is errors.EmbeddingNotCachedError:
        return errors.EmbeddingNotCachedError("2 images are not cached", indexes=[0, 3])
    if kind is errors.OverloadedError:
        return errors.OverloadedError("the queue is full", retry_after_s=2.5)
    return kind("value 7 is over the limit 5", metadata={"limit": "5"})


async def _failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("row", status_codes.STATUS_TABLE, ids=lambda row: row.reason)
async def test_every_row_of_the_status_table_reaches_the_client_as_its_typed_error(
    row: status_codes.StatusRow,
) -> None:
    async with _running() as running:
        sent = running.servicer.error = _example(row.exception)
        failure = await _failure(running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5))
        received = status_codes.from_rpc_error(failure)
        assert failure.code() is row.code
        assert type(received) is row.exception
        assert (received.message, received.metadata) == (sent.message, sent.metadata)
        assert getattr(received, "indexes", None) == getattr(sent, "indexes", None)
        assert getattr(received, "retry_after_s", None) == getattr(sent, "retry_after_s", None)


@pytest.mark.parametrize("error", [ValueError(SECRET), errors.ConfigurationError(SECRET), errors.LookonceError(SECRET)])
@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"])
async def test_unexpected_errors_become_internal_with_an_opaque_id_for_every_kind_of_call(
    kind: str, error: Exception, log_lines: Any
) -> None:
    async with _running(error) as running:
        failure = await _failure(_call(running.channel, kind))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert type(status_codes.from_rpc_error(failure)) is errors.InternalError
    assert SECRET not in f"{failure.details()} {failure.trailing_metadata()}"
    fault_id = (failure.details() or "").removeprefix("internal error ")
    (line,) = [line for line in log_lines() if line.get("fault_id") == fault_id]
    assert SECRET in line["exception"]
    assert line["exception"].startswith("Traceback")


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"])
async def test_typed_errors_pass_for_every_kind_of_call(kind: str) -> None:
    async with _running(errors.PromptEmptyError("nothing to say")) as running:
        failure = await _failure(_call(running.channel, kind))
    assert type(status_codes.from_rpc_error(failure)) is errors.PromptEmptyError


async def _call(channel: Any, kind: str) -> None:
    method = f"/{KINDS}/{kind}"
    if kind == "UnaryUnary":
        await channel.unary_unary(method)(b"", timeout=5)
    elif kind == "StreamUnary":
        await channel.stream_unary(method)(iter([b"", b""]), timeout=5)
    elif kind == "UnaryStream":
        await _second_message(channel.unary_stream(method)(b"", timeout=5))
    else:
        call = channel.stream_stream(method)(timeout=5)
        await call.write(b"")
        await call.done_writing()
        await _second_message(call)


async def _second_message(call: Any) -> None:
    assert await call.read() == b"first"
    await call.read()


@pytest.mark.parametrize("message", ["x" * 50_000, "日本語" * 5_000], ids=["ascii", "wide"])
async def test_a_very_long_message_is_cut_and_still_typed(message: str) -> None:
    async with _running() as running:
        running.servicer.error = errors.InvalidParameterError("prompt", message)
        failure = await _failure(running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5))
    received = status_codes.from_rpc_error(failure)
    assert isinstance(received, errors.InvalidParameterError)
    assert received.field == "prompt"
    assert received.message.endswith("…")


async def test_garbage_instead_of_a_request_is_invalid_input_and_the_next_call_works() -> None:
    async with _running() as running:
        raw: Any = running.channel.unary_unary(f"/{ENCODER}/Encode")
        failure = await _failure(raw(b"\xff\xff\xff\xff", timeout=5))
        assert type(status_codes.from_rpc_error(failure)) is errors.InvalidInputError
        response = await running.encoder.Encode(pb.EncodeRequest(items=[pb.EncodeItem()]), timeout=5)
        assert len(response.results) == 1


async def test_a_message_over_the_limit_is_resource_exhausted_and_the_next_call_works() -> None:
    async with _running(max_message_bytes=MIB) as running:
        item = pb.EncodeItem()
        item.image.data = bytes(MIB + 1)
        failure = await _failure(running.encoder.Encode(pb.EncodeRequest(items=[item]), timeout=5))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert type(status_codes.from_rpc_error(failure)) is errors.MessageTooLargeError
        item.image.data = bytes(MIB // 2)
        assert len((await running.encoder.Encode(pb.EncodeRequest(items=[item]), timeout=5)).results) == 1


async def test_a_valid_request_id_comes_back_and_an_invalid_one_is_replaced() -> None:
    async with _running() as running:
        returned = []
        for offered in ("turn-7.a_B", "no spaces allowed", "x" * 65):
            call = running.encoder.GetEncoderInfo(
                pb.GetEncoderInfoRequest(), metadata=(("x-request-id", offered),), timeout=5
            )
            await call
            returned.append(dict(await call.trailing_metadata())["x-request-id"])
        assert returned[0] == "turn-7.a_B"
        assert all(len(str(made_up)) == 32 for made_up in returned[1:])
        assert returned[1] != returned[2]


async def test_a_failed_call_returns_its_request_id() -> None:
    async with _running(ValueError(SECRET)) as running:
        method: Any = running.channel.unary_unary(f"/{KINDS}/UnaryUnary")
        call = method(b"", metadata=(("x-request-id", "r1"),), timeout=5)
        await _failure(call)
        assert dict(await call.trailing_metadata())["x-request-id"] == "r1"


async def test_each_call_leaves_one_access_line_and_its_metrics(log_lines: Any) -> None:
    async with _running() as running:
        await running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)
        running.servicer.error = errors.UnsupportedError("no")
        await _failure(running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5))
        await running.health_of("")
    count = running.telemetry.registry.get_sample_value
    method = f"/{ENCODER}/GetEncoderInfo"
    assert count("lookonce_grpc_requests_total", {"method": method, "code": "OK"}) == 1
    assert count("lookonce_grpc_requests_total", {"method": method, "code": "UNIMPLEMENTED"}) == 1
    assert count("lookonce_grpc_request_seconds_count", {"method": method}) == 2
    lines = [line for line in log_lines() if line["event"] == "rpc"]
    assert [(line["method"], line["code"]) for line in lines] == [(method, "OK"), (method, "UNIMPLEMENTED")]
    assert all(len(line["request_id"]) == 32 and line["duration_s"] > 0 for line in lines)


async def test_a_cancelled_stream_closes_its_handler_at_once() -> None:
    async with _running() as running:
        call = running.encoder.ReadEmbedding(pb.ReadEmbeddingRequest(), timeout=60)
        await call.read()
        call.cancel()

        async def closed() -> bool:
            return running.servicer.closed_generators == 1

        await _until(closed)
        code = {"method": f"/{ENCODER}/ReadEmbedding", "code": "CANCELLED"}
        assert running.telemetry.registry.get_sample_value("lookonce_grpc_requests_total", code) == 1


@pytest.mark.parametrize("way", ["cancels", "runs out of time", "hangs up"])
async def test_who_leaves_while_a_message_is_being_written_is_no_fault(way: str, log_lines: Any) -> None:
    async with _running() as running:
        for _ in range(5):
            timeout_s = 1.0 if way == "runs out of time" else 60
            channel = grpc.aio.insecure_channel(running.service.target, options=CHANNEL_OPTIONS)
            await channel.channel_ready()
            method: Any = channel.unary_stream(f"/{KINDS}/Flood")
            call = method(b"", timeout=timeout_s)
            await call.read()
            # What nobody reads stands in the way of what follows.
            await asyncio.sleep(0.2)
            if way == "cancels":
                call.cancel()
            elif way == "runs out of time":
                await asyncio.sleep(1.0)
            await channel.close()

        async def counted() -> bool:
            return len([line for line in log_lines() if line["event"] == "rpc"]) == 5

        await _until(counted)
    lines = log_lines()
    codes = {"DEADLINE_EXCEEDED", "CANCELLED"} if way == "runs out of time" else {"CANCELLED"}
    assert {line["code"] for line in lines if line["event"] == "rpc"} <= codes
    assert not [line for line in lines if line["level"] in ("warning", "error")]


async def test_health_follows_readiness_for_the_server_and_each_service() -> None:
    ready = False
    async with _running(is_ready=lambda: ready) as running:
        for name in ("", ENCODER, KINDS):
            assert await running.health_of(name) == Health.NOT_SERVING
        for expected in (Health.SERVING, Health.NOT_SERVING):
            ready = expected == Health.SERVING

            async def reports(expected: Any = expected) -> bool:
                return all([await running.health_of(name) == expected for name in ("", ENCODER, KINDS)])

            await _until(reports)
        failure = await _failure(running.health_of("no.such.Service"))
        assert failure.code() is grpc.StatusCode.NOT_FOUND


async def test_the_ready_file_appears_when_ready_and_goes_at_the_drain(tmp_path: pathlib.Path) -> None:
    ready_file, ready = tmp_path / "ready.json", False
    async with _running(is_ready=lambda: ready, ready_file=ready_file, metrics_listen="127.0.0.1:0") as running:
        assert not ready_file.exists()
        ready = True

        async def written() -> bool:
            return ready_file.exists()

        await _until(written)
        record = json.loads(ready_file.read_text())
        assert record["target"] == running.service.target
        assert record["metrics_port"] == running.telemetry.metrics_port
    assert not ready_file.exists()


def _reflection(channel: grpc.aio.Channel) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    return stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)


async def test_reflection_is_for_operators_and_lists_every_service() -> None:
    async with (
        _running(admin_listen="127.0.0.1:0") as running,
        grpc.aio.insecure_channel(str(running.service.admin_target), options=CHANNEL_OPTIONS) as channel,
    ):
        async for response in _reflection(channel):
            names = {service.name for service in response.list_services_response.service}
        assert {ENCODER, KINDS, "grpc.health.v1.Health"} <= names
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(_reflection(running.channel)))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "clients have none"


async def test_an_unknown_method_is_unimplemented() -> None:
    async with _running() as running:
        method: Any = running.channel.unary_unary("/no.such.Service/Call")
        failure = await _failure(method(b"", timeout=5))
        assert failure.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with _running() as running:
        telemetry = Telemetry()
        with pytest.raises(errors.ConfigurationError, match="cannot listen"):
            await GrpcService(_settings(listen=running.service.target), telemetry, []).start()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:50051", "example.com:80"])
def test_plaintext_on_an_address_that_others_reach_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="plaintext"):
        parse_settings(ServiceSettings, ["--model", ".", "--listen", address], "test")
    assert parse_settings(ServiceSettings, ["--model", ".", "--listen", address, "--insecure"], "test").insecure


class Process:
    """The slow service of `serving_program.py` in a process of its own."""

    def __init__(self, folder: pathlib.Path, *flags: str) -> None:
        self.ready_file = folder / "ready.json"
        command = [*PROGRAM, "--model", ".", "--ready-file", str(self.ready_file), *flags]
        self.log_file = (folder / "log").open("w+")
        self.popen = subprocess.Popen(command, stderr=self.log_file, cwd=ROOT)

    async def target(self) -> str:
        async def written() -> bool:
            assert self.popen.poll() is None, self.log()
            return self.ready_file.exists()

        await _until(written)
        return str(json.loads(self.ready_file.read_text())["target"])

    def log(self) -> str:
        self.log_file.flush()
        return pathlib.Path(self.log_file.name).read_text()

    async def exit_status(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 20)


@pytest.fixture
def processes(tmp_path: pathlib.Path) -> Iterator[Any]:
    started: list[Process] = []

    def start(*flags: str) -> Process:
        started.append(Process(tmp_path, *flags))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()
        process.popen.wait()
        process.log_file.close()


async def _items(*names: str) -> AsyncIterator[pb.EncodeStreamRequest]:
    for name in names:
        yield pb.EncodeStreamRequest(item_id=name)


async def test_sigterm_lets_a_stream_finish_refuses_new_calls_and_exits_0(processes: Any) -> None:
    process = processes("--drain-timeout-s", "20", "--drain-delay-s", "0.3")
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        stream: Any = encoder.EncodeStream(_items(*"abcdefgh"), timeout=30)
        assert (await stream.read()).item_id == "a"
        process.popen.send_signal(signal.SIGTERM)

        async def not_serving() -> bool:
            response = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            return bool(response.status == Health.NOT_SERVING)

        await _until(not_serving)
        # Still inside the delay: load balancers have time to see NOT_SERVING.
        await encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)

        async def refused() -> bool:
            call = encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)
            code = await call.code()
            assert code in {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
            return code is grpc.StatusCode.UNAVAILABLE

        await _until(refused)
        assert [(await stream.read()).item_id for _ in "bcdefgh"] == list("bcdefgh")
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert await process.exit_status() == 0, process.log()


async def test_what_outlives_the_drain_gets_unavailable_and_the_exit_is_0(processes: Any) -> None:
    process = processes("--drain-timeout-s", "0.5")
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)
        stream: Any = encoder.EncodeStream(_items("a", "forever"), timeout=30)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await watch.read()).status == Health.SERVING
        assert (await stream.read()).item_id == "a"
        process.popen.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == Health.NOT_SERVING
        failure = await _failure(stream.read())
        error = status_codes.from_rpc_error(failure)
        assert type(error) is errors.UnavailableError
        assert "shutting down" in error.message
        assert await process.exit_status() == 0, process.log()


async def test_an_idle_health_watcher_does_not_hold_the_drain(processes: Any) -> None:
    process = processes("--drain-timeout-s", "600")
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watch.read()).status == Health.SERVING
        process.popen.send_signal(signal.SIGINT)
        assert await process.exit_status() == 0, process.log()


async def test_a_second_signal_ends_the_process_at_once(processes: Any) -> None:
    process = processes("--drain-timeout-s", "600")
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)
        stream: Any = encoder.EncodeStream(_items("a", "forever"), timeout=60)
        await stream.read()
        process.popen.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return "draining" in process.log()

        await _until(draining)
        process.popen.send_signal(signal.SIGTERM)
        assert await process.exit_status() == -signal.SIGTERM


async def test_a_connection_over_its_age_ends_behind_its_last_stream_and_calls_go_on(processes: Any) -> None:
    process = processes("--max-connection-age-s", "0.5", "--max-connection-age-grace-s", "600")
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)

        async def peer() -> str:
            """The client's end of the connection that a call takes; no call may fail."""
            return (await encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)).model

        stream: Any = encoder.EncodeStream(timeout=60)
        old = await peer()

        async def answered(item: str) -> bool:
            await stream.write(pb.EncodeStreamRequest(item_id=item))
            return bool((await stream.read()).item_id == item)

        assert await answered("a")

        async def is_asked_to_end() -> bool:
            return await peer() != old

        await _until(is_asked_to_end)
        assert _ports_of_clients(process) >= {_port(old)}, "the stream keeps it"
        assert await answered("b")
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK

        async def has_ended() -> bool:
            return _port(old) not in _ports_of_clients(process)

        await _until(has_ended)
        await peer()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _ports_of_clients(process: Process) -> set[int]:
    connections = psutil.Process(process.popen.pid).net_connections("tcp")
    return {one.raddr.port for one in connections if one.status == psutil.CONN_ESTABLISHED}


def test_settings_that_are_wrong_end_the_process_with_2_and_the_reason() -> None:
    command = [*PROGRAM, "--model", ".", "--listen", "0.0.0.0:0"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: ")
    assert "plaintext" in finished.stderr
    assert "Traceback" not in finished.stderr
