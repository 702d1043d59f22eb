"""The server shell, against real servers on loopback."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
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
from lookonce.server.serving import GrpcService, check_files
from lookonce.server.settings import MIB
from lookonce.server.telemetry import Telemetry
from tests.lookonce.server.program_process import PROGRAM, ROOT, ProgramProcess
from tests.lookonce.server.running_server import (
    CHANNEL_OPTIONS,
    ENCODER,
    KINDS,
    rpc_failure,
    running_server,
    server_settings,
    until,
)
from tests.lookonce.server.silent_clients import silent_client

Health = health_pb2.HealthCheckResponse


async def test_a_message_over_the_limit_is_resource_exhausted_and_the_next_call_works() -> None:
    async with running_server(max_message_bytes=MIB, max_image_bytes=MIB) as running:
        item = pb.EncodeItem()
        item.image.data = bytes(MIB + 1)
        failure = await rpc_failure(running.encoder.Encode(pb.EncodeRequest(items=[item]), timeout=5))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = status_codes.from_rpc_error(failure)
        assert type(error) is errors.MessageTooLargeError
        assert str(MIB) in error.message
        assert "smaller images" in error.message
        item.image.data = bytes(MIB // 2)
        assert len((await running.encoder.Encode(pb.EncodeRequest(items=[item]), timeout=5)).results) == 1


async def test_health_follows_readiness_for_the_server_and_each_service() -> None:
    ready = False
    async with running_server(is_ready=lambda: ready) as running:
        for name in ("", ENCODER, KINDS):
            assert await running.health_of(name) == Health.NOT_SERVING
        for expected in (Health.SERVING, Health.NOT_SERVING):
            ready = expected == Health.SERVING

            async def reports(expected: Any = expected) -> bool:
                return all([await running.health_of(name) == expected for name in ("", ENCODER, KINDS)])

            await until(reports)
        failure = await rpc_failure(running.health_of("no.such.Service"))
        assert failure.code() is grpc.StatusCode.NOT_FOUND


async def test_the_ready_file_appears_when_ready_and_goes_at_the_drain(tmp_path: pathlib.Path) -> None:
    ready_file, ready = tmp_path / "ready.json", False
    async with running_server(is_ready=lambda: ready, ready_file=ready_file, metrics_listen="127.0.0.1:0") as running:
        assert not ready_file.exists()
        ready = True

        async def written() -> bool:
            return ready_file.exists()

        await until(written)
        record = json.loads(ready_file.read_text())
        assert record["target"] == running.service.target
        assert record["metrics_port"] == running.telemetry.metrics_port
    assert not ready_file.exists()


async def test_a_watch_whose_client_takes_no_answer_stops_neither_other_watches_nor_readiness(
    tmp_path: pathlib.Path,
) -> None:
    ready_file, ready = tmp_path / "ready.json", False
    async with (
        running_server(is_ready=lambda: ready, ready_file=ready_file) as running,
        silent_client(running.service.target),
    ):
        watch = running.health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert (await watch.read()).status == Health.NOT_SERVING
        ready = True
        assert (await watch.read()).status == Health.SERVING

        async def written() -> bool:
            return ready_file.exists()

        await until(written)
        ready = False
        assert (await watch.read()).status == Health.NOT_SERVING


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/ready.json", "No such file or directory"),
        ("file/ready.json", "Not a directory"),
        ("r" * 300, "File name too long"),
        ("locked/ready.json", "Permission denied"),
        ("folder", "it is a folder"),
    ],
)
def test_a_ready_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    name: str, reason: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked").mkdir()
    if name.startswith("locked"):

        def refused(**_: object) -> None:
            raise PermissionError(13, "Permission denied")

        # The tests may run as root, whom no rights keep out.
        monkeypatch.setattr("tempfile.NamedTemporaryFile", refused)
    with pytest.raises(errors.ConfigurationError) as caught:
        check_files(server_settings(ready_file=tmp_path / name))
    assert caught.value.message == f"ready_file: cannot write {tmp_path / name}: {reason}"


def test_the_check_of_the_ready_file_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    check_files(server_settings(ready_file=tmp_path / "ready.json"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_connections", "num_calls"), [(1, 3000), (4, 1200)])
async def test_in_a_flood_of_calls_every_refusal_has_its_reason_and_delay(num_connections: int, num_calls: int) -> None:
    """gRPC itself must refuse none of them: its refusals have neither."""
    async with running_server() as running, AsyncExitStack() as exits:
        running.servicer.error = errors.OverloadedError("full", retry_after_s=2.5)
        channels = [
            await exits.enter_async_context(grpc.aio.insecure_channel(running.service.target, options=CHANNEL_OPTIONS))
            for _ in range(num_connections)
        ]
        stubs: list[pb_grpc.EncoderServiceAsyncStub] = [pb_grpc.EncoderServiceStub(channel) for channel in channels]
        chosen = [stubs[i % num_connections] for i in range(num_calls)]
        calls = [stub.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60) for stub in chosen]
        failures = [await rpc_failure(call) for call in calls]
    found = Counter((failure.code(), repr(status_codes.from_rpc_error(failure))) for failure in failures)
    assert found == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "OverloadedError('full')"): num_calls}
    delays = {getattr(status_codes.from_rpc_error(failure), "retry_after_s", None) for failure in failures}
    assert delays == {2.5}


async def test_reflection_is_for_operators_and_lists_every_service() -> None:
    async with (
        running_server(admin_listen="127.0.0.1:0") as running,
        grpc.aio.insecure_channel(str(running.service.admin_target), options=CHANNEL_OPTIONS) as channel,
    ):
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for response in stub.ServerReflectionInfo(iter([asked]), timeout=5):
            names = {service.name for service in response.list_services_response.service}
        assert {ENCODER, KINDS, "grpc.health.v1.Health"} <= names
        of_clients = reflection_pb2_grpc.ServerReflectionStub(running.channel).ServerReflectionInfo(timeout=5)
        assert await of_clients.code() is grpc.StatusCode.UNIMPLEMENTED, "clients have none"


async def test_an_unknown_method_is_unimplemented() -> None:
    async with running_server() as running:
        method: Any = running.channel.unary_unary("/no.such.Service/Call")
        failure = await rpc_failure(method(b"", timeout=5))
        assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
        error = status_codes.from_rpc_error(failure)
        assert type(error) is errors.UnsupportedError
        assert "older than this client" in error.message


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with running_server() as running:
        telemetry = Telemetry()
        with pytest.raises(errors.ConfigurationError, match="cannot listen"):
            await GrpcService(server_settings(listen=running.service.target), telemetry, []).start()


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

        await until(not_serving)
        # During the drain delay calls are still served, so that load balancers have time to see NOT_SERVING.
        await encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)

        async def refused() -> bool:
            call = encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)
            code = await call.code()
            assert code in {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
            return code is grpc.StatusCode.UNAVAILABLE

        await until(refused)
        assert [(await stream.read()).item_id for _ in "bcdefgh"] == list("bcdefgh")
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert await process.exit_status() == 0, process.log()


async def test_under_load_a_drain_answers_every_call_with_ok_or_unavailable_and_its_reason(processes: Any) -> None:
    process = processes("--drain-timeout-s", "5")
    answers: Counter[tuple[str, str]] = Counter()
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)

        async def ask_until_refused() -> None:
            while True:
                call = encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=30)
                code = await call.code()
                answers[code.name, str(await call.details())] += 1
                if code is not grpc.StatusCode.OK:
                    return

        callers = [asyncio.create_task(ask_until_refused()) for _ in range(64)]
        while answers["OK", ""] <= 200:
            await asyncio.sleep(0.01)
        process.popen.send_signal(signal.SIGTERM)
        await asyncio.gather(*callers)
        assert await process.exit_status() == 0, process.log()
    del answers["OK", ""]
    assert answers == {("UNAVAILABLE", "the server is shutting down; retry on another replica"): 64}


async def test_calls_that_outlive_the_drain_get_unavailable_and_the_exit_is_0(processes: Any) -> None:
    process = processes("--drain-timeout-s", "0.5")
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)
        stream: Any = encoder.EncodeStream(_items("a", "forever"), timeout=30)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await watch.read()).status == Health.SERVING
        assert (await stream.read()).item_id == "a"
        process.popen.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == Health.NOT_SERVING
        failure = await rpc_failure(stream.read())
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


async def test_a_watch_whose_client_takes_no_answer_does_not_hold_the_drain(processes: Any) -> None:
    process = processes("--drain-timeout-s", "600")
    async with silent_client(await process.target()):
        process.popen.send_signal(signal.SIGTERM)
        assert await process.exit_status() == 0, process.log()
    assert "Traceback" not in process.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_that_is_still_loading_at_once(number: signal.Signals) -> None:
    """A model is loaded in one piece, during which the event loop does nothing."""
    program = """
import time
from lookonce.server import serving
async def main():
    print("loading", flush=True)
    time.sleep(3600)
serving.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as loading:
        assert loading.stdout is not None
        assert loading.stdout.readline() == b"loading\n"
        loading.send_signal(number)
        _, errors = loading.communicate(timeout=30)
    assert (loading.returncode, errors) == (-number, b"")


async def test_a_second_signal_ends_the_process_at_once(processes: Any) -> None:
    process = processes("--drain-timeout-s", "600")
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)
        stream: Any = encoder.EncodeStream(_items("a", "forever"), timeout=60)
        await stream.read()
        process.popen.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return "draining" in process.log()

        await until(draining)
        process.popen.send_signal(signal.SIGTERM)
        assert await process.exit_status() == -signal.SIGTERM


async def test_a_connection_over_its_age_ends_behind_its_last_stream_and_calls_go_on(processes: Any) -> None:
    process = processes("--max-connection-age-s", "0.5", "--max-connection-age-grace-s", "600")
    async with grpc.aio.insecure_channel(await process.target(), options=CHANNEL_OPTIONS) as channel:
        encoder: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)

        async def peer() -> str:
            """Returns the client's end of a call's connection. No call may fail."""
            return (await encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)).model

        stream: Any = encoder.EncodeStream(timeout=60)
        old = await peer()

        async def answered(item: str) -> bool:
            await stream.write(pb.EncodeStreamRequest(item_id=item))
            return bool((await stream.read()).item_id == item)

        assert await answered("a")

        async def is_asked_to_end() -> bool:
            return await peer() != old

        await until(is_asked_to_end)
        assert _ports_of_clients(process) >= {_port(old)}, "the stream keeps it"
        assert await answered("b")
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK

        async def has_ended() -> bool:
            return _port(old) not in _ports_of_clients(process)

        await until(has_ended)
        await peer()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _ports_of_clients(process: ProgramProcess) -> set[int]:
    connections = psutil.Process(process.popen.pid).net_connections("tcp")
    return {one.raddr.port for one in connections if one.status == psutil.CONN_ESTABLISHED}


def test_settings_that_are_wrong_end_the_process_with_2_and_the_reason() -> None:
    command = [*PROGRAM, "--model", ".", "--listen", "0.0.0.0:0"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: ")
    assert "plaintext" in finished.stderr
    assert "Traceback" not in finished.stderr
