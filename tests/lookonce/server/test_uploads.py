"""A request is received when its call has been admitted and there is a slot for it; silent callers do not stay."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import pathlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lookonce import errors, status_codes
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.identity import TENANT_KEY
from lookonce.server import server_options
from lookonce.server.receiving import inbox
from lookonce.server.receiving.receive_slots import ReceiveSlots
from lookonce.server.receiving.unfinished_reads import ReadLimits, UnfinishedReads
from lookonce.server.settings import MIB
from tests.lookonce.server.admission.test_call_gate import bearer, running
from tests.lookonce.server.certificates import Files
from tests.lookonce.server.counting_proxy import counting_proxy
from tests.lookonce.server.program_process import ProgramProcess
from tests.lookonce.server.running_server import (
    CHANNEL_OPTIONS,
    ENCODER,
    KINDS,
    rpc_failure,
    running_server,
    until,
)

ENCODE, INFO = f"/{ENCODER}/Encode", f"/{ENCODER}/GetEncoderInfo"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
NUM_CALLS = 8
LARGE = 16 * MIB
# HTTP/2's preface, an empty SETTINGS frame, and the acknowledgement of the server's (RFC 9113).
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, SETTINGS_ACK = b"\0\0\0\x04\0\0\0\0\0", b"\0\0\0\x04\x01\0\0\0\0"


def large_request(num_bytes: int = LARGE) -> pb.EncodeRequest:
    item = pb.EncodeItem()
    item.image.data = bytes(num_bytes)
    return pb.EncodeRequest(items=[item])


def channel_to(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)


def memory_of(process: ProgramProcess) -> Counter[str]:
    """Returns the process's counts that the kernel keeps: memory in KiB (most: VmHWM), and threads."""
    try:
        lines = pathlib.Path(f"/proc/{process.popen.pid}/status").read_text().splitlines()
    except OSError:
        pytest.skip("Linux alone tells the memory of a process in /proc")
    fields = (line.partition(":") for line in lines)
    return Counter({name: int(value.split()[0]) for name, _, value in fields if name in ("VmHWM", "Threads")})


HURRIED = ReadLimits(max_reads=16, max_reads_of_caller=4, sure_s=0.05, max_receive_s=0.2)


class MostReads:
    """Notes how many messages are read at the same time, and how many reads have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.now = self.num_begun = 0
        for receiver in (ReceiveSlots, UnfinishedReads):
            monkeypatch.setattr(receiver, "receive", self._counted(receiver.receive))

    def _counted(self, receive: Any) -> Any:
        async def counted(receiver: Any, caller: str, read: Any, *, may_pause: bool) -> Any:
            async def counted_read() -> Any:
                self.num_begun += 1
                self.now += 1
                self.most = max(self.most, self.now)
                try:
                    return await read()
                finally:
                    self.now -= 1

            return await receive(receiver, caller, counted_read, may_pause=may_pause)

        return counted


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> MostReads:
    return MostReads(monkeypatch)


async def test_calls_without_a_token_are_refused_before_they_upload(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as server, counting_proxy(server.service.target) as (proxy, channel):
        stub: Any = pb_grpc.EncoderServiceStub(channel)
        # Uploads that are received teach gRPC how fast the connection is. It must not use that.
        for _ in range(3):
            await rpc_failure(stub.Encode(large_request(), metadata=(bearer("client"),), timeout=60))
        before = proxy.num_bytes
        assert before > 3 * LARGE
        calls = [rpc_failure(stub.Encode(large_request(), timeout=60)) for _ in range(NUM_CALLS)]
        for failure in await asyncio.gather(*calls):
            assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
            assert type(status_codes.from_rpc_error(failure)) is errors.UnauthenticatedError
        assert proxy.num_bytes - before <= NUM_CALLS * 5 * MIB


async def test_refused_uploads_take_no_memory(processes: Any, tmp_path: pathlib.Path) -> None:
    tokens = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"token").hexdigest()
    tokens.write_text(f'[[tokens]]\nname = "a"\nrole = "client"\ntenant = "acme"\nsha256 = "{digest}"\n')
    process = processes("--auth-tokens-file", str(tokens))
    async with channel_to(await process.target()) as channel:
        method: Any = channel.unary_unary(ENCODE)
        await rpc_failure(method(b"", timeout=60))
        before = memory_of(process)
        request = large_request(60 * MIB).SerializeToString()
        failures = await asyncio.gather(*(rpc_failure(method(request, timeout=60)) for _ in range(20)))
        assert {failure.code() for failure in failures} == {grpc.StatusCode.UNAUTHENTICATED}
        assert memory_of(process)["VmHWM"] - before["VmHWM"] < 100 << 10


async def test_a_message_over_the_limit_is_refused_by_its_size_alone(processes: Any) -> None:
    """A call that is read takes no more memory than a message of the largest size."""
    process = processes()
    async with channel_to(await process.target()) as channel:
        method: Any = channel.unary_unary(HEALTH_CHECK)
        await method(b"", timeout=60)
        before = memory_of(process)
        failure = await rpc_failure(method(bytes(200 * MIB), timeout=60))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert memory_of(process)["VmHWM"] - before["VmHWM"] < 50 << 10


async def test_uploads_wait_for_slots_and_all_are_answered(reads: MostReads) -> None:
    limits: dict[str, Any] = {"max_message_bytes": LARGE + MIB, "max_receive_bytes": 4 * (LARGE + MIB)}
    async with running_server(**limits) as server, contextlib.AsyncExitStack() as exits:
        channels = [await exits.enter_async_context(channel_to(server.service.target)) for _ in range(3)]
        stubs: list[Any] = [pb_grpc.EncoderServiceStub(channel) for channel in channels]
        calls = [stubs[i % len(stubs)].Encode(large_request(), timeout=120) for i in range(20)]
        assert all([len((await call).results) == 1 for call in calls])
    assert (reads.most, reads.now) == (4, 0)


async def test_a_request_of_the_largest_size_is_received_when_the_memory_is_set_too_small() -> None:
    async with running_server(max_message_bytes=LARGE + MIB, max_receive_bytes=MIB) as server:
        assert len((await server.encoder.Encode(large_request(), timeout=60)).results) == 1


async def test_a_thousand_small_requests_at_once_are_all_answered(reads: MostReads) -> None:
    async with running_server(max_receive_bytes=MIB) as server:
        calls = [server.encoder.Encode(pb.EncodeRequest(items=[pb.EncodeItem()]), timeout=60) for _ in range(1000)]
        for call in calls:
            assert len((await call).results) == 1
    assert reads.most == 1


async def test_a_cancelled_upload_gives_its_slot_back(log_lines: Any, reads: MostReads) -> None:
    async with running_server() as server:
        method: Any = server.channel.stream_unary(ENCODE)
        call = method(timeout=60)
        # The call's headers go out, its message does not.
        await call.wait_for_connection()
        await until(lambda: _is_true(lambda: reads.now == 1))
        call.cancel()
        await until(lambda: _is_true(lambda: reads.now == 0))
        await until(lambda: _is_true(lambda: any(line["event"] == "rpc" for line in log_lines())))
    assert [line["code"] for line in log_lines() if line["event"] == "rpc"] == ["CANCELLED"]


async def _is_true(condition: Callable[[], bool]) -> bool:
    return condition()


async def test_a_call_that_ends_without_its_request_is_refused() -> None:
    async with running_server() as server:
        method: Any = server.channel.stream_unary(ENCODE)
        failure = await rpc_failure(method(iter([]), timeout=30))
        assert type(status_codes.from_rpc_error(failure)) is errors.InvalidInputError


async def test_of_several_requests_in_a_unary_call_the_first_counts() -> None:
    request = pb.EncodeRequest(items=[pb.EncodeItem()]).SerializeToString()
    async with running_server() as server:
        # Clients of grpc.aio report an error of their own if the answer comes while they still send.
        with grpc.insecure_channel(server.service.target, options=CHANNEL_OPTIONS) as channel:
            method: Any = channel.stream_unary(ENCODE)
            answer = await asyncio.to_thread(method, iter([request, b"\xff"]), timeout=30)
    assert len(pb.EncodeResponse.FromString(answer).results) == 1


@pytest.mark.parametrize("method", [INFO, HEALTH_CHECK])
async def test_a_call_whose_request_does_not_come_is_ended(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_OPEN_READS", "_SHORT_READS"):
        monkeypatch.setattr(inbox, name, HURRIED)
    async with running_server() as server:
        call: Any = server.channel.stream_unary(method)
        failure = await rpc_failure(call(timeout=60))
        assert type(status_codes.from_rpc_error(failure)) is errors.DeadlineError


@pytest.mark.parametrize("num_channels", [1, 24])
@pytest.mark.parametrize("method", [INFO, HEALTH_CHECK])
async def test_calls_beside_silent_ones_are_answered(
    method: str, num_channels: int, reads: MostReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound on their number, each silent caller could send 32 MiB at any moment."""
    for name in ("_OPEN_READS", "_SHORT_READS"):
        # On a busy machine the first silent calls may end for others before the last ones begin, and none for its time.
        monkeypatch.setattr(inbox, name, dataclasses.replace(getattr(inbox, name), max_receive_s=120.0))
    async with running_server() as server, contextlib.AsyncExitStack() as exits:
        channels = [await exits.enter_async_context(channel_to(server.service.target)) for _ in range(num_channels)]
        methods: list[Any] = [channel.stream_unary(method) for channel in channels]
        silent = [methods[number % num_channels](timeout=60) for number in range(48)]
        for call in silent:
            exits.callback(call.cancel)
        await until(lambda: _is_true(lambda: reads.num_begun == 48))
        for channel in (server.channel, channels[0]):
            honest: Any = channel.unary_unary(method)
            for _ in range(20):
                await honest(b"", timeout=30)
        await until(lambda: _is_true(lambda: sum(not call.done() for call in silent) <= 16))
        failures = [await rpc_failure(call) for call in silent if call.done()]
        assert {type(status_codes.from_rpc_error(failure)) for failure in failures} == {errors.OverloadedError}


async def test_uploads_of_images_do_not_keep_out_health_and_short_requests() -> None:
    async with running_server(max_receive_bytes=MIB) as server, contextlib.AsyncExitStack() as exits:
        for _ in range(2):
            channel = await exits.enter_async_context(channel_to(server.service.target))
            method: Any = channel.stream_unary(ENCODE)
            call = method(timeout=60)
            exits.callback(call.cancel)
            await call.wait_for_connection()
        for _ in range(20):
            assert await server.health_of("") == health_pb2.HealthCheckResponse.SERVING
            await server.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=10)


async def test_silent_uploads_of_a_tenant_do_not_keep_out_another_one(tmp_path: pathlib.Path, reads: MostReads) -> None:
    async with running(tmp_path, max_receive_bytes=MIB) as server, contextlib.AsyncExitStack() as exits:
        for _ in range(3):
            channel = await exits.enter_async_context(channel_to(server.service.target))
            method: Any = channel.stream_unary(ENCODE)
            for _ in range(4):
                call = method(metadata=(bearer("client"),), timeout=60)
                exits.callback(call.cancel)
                await call.wait_for_connection()
        await until(lambda: _is_true(lambda: reads.now == 1))
        stub: Any = pb_grpc.EncoderServiceStub(server.channel)
        other = (bearer("service"), (TENANT_KEY, "globex"))
        for _ in range(20):
            failure = await rpc_failure(stub.Encode(pb.EncodeRequest(), metadata=other, timeout=30))
            assert failure.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_without_tokens_a_connection_is_one_caller_whatever_tenants_it_names(reads: MostReads) -> None:
    async with running_server(max_message_bytes=MIB, max_image_bytes=MIB, max_receive_bytes=4 * MIB) as server:
        method: Any = server.channel.stream_unary(ENCODE)
        silent = [method(metadata=((TENANT_KEY, f"tenant-{number}"),), timeout=60) for number in range(8)]
        await until(lambda: _is_true(lambda: reads.now >= 2))
        async with channel_to(server.service.target) as channel:
            stub: Any = pb_grpc.EncoderServiceStub(channel)
            # A free slot is there at once. An overdue one would be free after a second.
            for _ in range(4):
                await stub.Encode(pb.EncodeRequest(), timeout=30)
        assert reads.now == 2, "the connection has half of the slots"
        for call in silent:
            call.cancel()


async def test_a_stream_may_pause_while_others_upload(reads: MostReads) -> None:
    async with running_server(max_receive_bytes=MIB) as server, channel_to(server.service.target) as channel:
        method: Any = channel.stream_stream(f"/{KINDS}/StreamStream")
        paused = method(timeout=60)
        await paused.write(b"")
        await until(lambda: _is_true(lambda: reads.now == 1))
        for _ in range(20):
            await server.encoder.Encode(large_request(MIB), timeout=30)
        await paused.done_writing()
        assert await paused.read() == b"first"


@pytest.mark.parametrize(
    ("num_bytes", "code"), [(30 * MIB, grpc.StatusCode.OK), (200 * MIB, grpc.StatusCode.RESOURCE_EXHAUSTED)]
)
async def test_a_compressed_request_is_unpacked_within_the_limit(num_bytes: int, code: grpc.StatusCode) -> None:
    async with running_server() as server:
        call = server.encoder.Encode(large_request(num_bytes), compression=grpc.Compression.Gzip, timeout=60)
        assert await call.code() is code


async def ends(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Reads until the server closes the connection."""
    reader, writer = connection
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
    writer.close()


@contextlib.asynccontextmanager
async def silent_connection(target: str, says: bytes) -> AsyncIterator[Any]:
    host, _, port = target.rpartition(":")
    connection = await asyncio.open_connection(host, int(port))
    connection[1].write(says)
    yield connection
    connection[1].close()


@pytest.mark.parametrize(
    "says", [b"", PREFACE, PREFACE + SETTINGS + SETTINGS_ACK], ids=["nothing", "no settings", "no call"]
)
async def test_a_silent_connection_ends(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_options, "_HANDSHAKE_TIMEOUT_MS", 200)
    async with (
        running_server(max_connection_age_s=0.5, max_connection_age_grace_s=0.1) as server,
        silent_connection(server.service.target, says) as connection,
        asyncio.timeout(20),
    ):
        await ends(connection)


async def test_a_connection_without_a_tls_handshake_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(server_options, "_HANDSHAKE_TIMEOUT_MS", 200)
    files = Files(tmp_path)
    files.issue(trustme.CA())
    async with (
        running_server(tls_cert=files.certificate, tls_key=files.key) as server,
        silent_connection(server.service.target, b"\x16\x03\x01") as connection,
        asyncio.timeout(20),
    ):
        await ends(connection)


async def test_silent_connections_cost_no_thread_and_little_memory(processes: Any) -> None:
    process = processes()
    target = await process.target()
    async with channel_to(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        before = memory_of(process)
        host, _, port = target.rpartition(":")
        with contextlib.ExitStack() as exits:
            for number in range(300):
                connection = exits.enter_context(socket.create_connection((host, int(port))))
                connection.sendall([b"", PREFACE, PREFACE + SETTINGS + SETTINGS_ACK][number % 3])
            for _ in range(20):
                await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            after = memory_of(process)
    assert after["Threads"] <= before["Threads"]
    assert after["VmHWM"] - before["VmHWM"] < 50 << 10
