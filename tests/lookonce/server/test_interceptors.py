"""Every call crosses the border with a typed status, a request id, an access line and metrics, whatever its kind."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

import grpc
import grpc.aio
import pytest

from lookonce import errors, status_codes
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.server.settings import MIB
from tests.lookonce.server import raw_calls
from tests.lookonce.server.running_server import CHANNEL_OPTIONS, ENCODER, KINDS, rpc_failure, running_server, until
from tests.rust_panic import panic

NUM_CALLS = 5
READER = """
import sys, time
import grpc

channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.max_receive_message_length", -1)])
calls = [channel.unary_stream(sys.argv[2])(b"") for _ in range(int(sys.argv[3]))]
for call in calls:
    next(call)
print("read", flush=True)
time.sleep(60)
"""
SECRET = "/home/someone/secret.txt at 0x7f00deadbeef"


def _example(kind: type[errors.LookonceError]) -> errors.LookonceError:
    if kind is errors.InvalidParameterError:
        return errors.InvalidParameterError("sampling.top_p", "must be in (0, 1], not 7")
    if kind is errors.EmbeddingNotCachedError:
        return errors.EmbeddingNotCachedError("2 images are not cached", indexes=[0, 3])
    if kind is errors.OverloadedError:
        return errors.OverloadedError("the queue is full", retry_after_s=2.5)
    return kind("value 7 is over the limit 5", metadata={"limit": "5"})


@pytest.mark.parametrize("row", status_codes.STATUS_TABLE, ids=lambda row: row.reason)
async def test_every_row_of_the_status_table_reaches_the_client_as_its_typed_error(
    row: status_codes.StatusRow,
) -> None:
    async with running_server() as running:
        sent = running.servicer.error = _example(row.exception)
        failure = await rpc_failure(running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5))
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
    async with running_server(error) as running:
        failure = await rpc_failure(_call(running.channel, kind))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert type(status_codes.from_rpc_error(failure)) is errors.InternalError
    assert SECRET not in f"{failure.details()} {failure.trailing_metadata()}"
    fault_id = (failure.details() or "").removeprefix("internal error ")
    (line,) = [line for line in log_lines() if line.get("fault_id") == fault_id]
    assert SECRET in line["exception"]
    assert line["exception"].startswith("Traceback")


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"])
async def test_a_panic_in_rust_ends_its_own_call_with_internal_and_the_server_lives(kind: str, log_lines: Any) -> None:
    async with running_server(panic()) as running:
        for _ in range(2):
            failure = await rpc_failure(_call(running.channel, kind))
            assert type(status_codes.from_rpc_error(failure)) is errors.InternalError
            fault_id = (failure.details() or "").removeprefix("internal error ")
            assert [line for line in log_lines() if line.get("fault_id") == fault_id]
        assert (await running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)).model == "test"


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"])
async def test_a_call_without_memory_is_asked_to_come_back_and_counted(kind: str, log_lines: Any) -> None:
    async with running_server(MemoryError(SECRET)) as running:
        failure = await rpc_failure(_call(running.channel, kind))
        labels = {"method": f"/{KINDS}/{kind}"}
        assert running.telemetry.registry.get_sample_value("lookonce_grpc_memory_errors_total", labels) == 1
    error = status_codes.from_rpc_error(failure)
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error, errors.OverloadedError)
    assert error.retry_after_s > 0
    assert SECRET not in f"{failure.details()} {failure.trailing_metadata()}"
    assert any(line["event"] == "no memory for a call" and line["level"] == "error" for line in log_lines())


async def test_a_recursion_that_is_too_deep_is_internal_and_the_next_call_works() -> None:
    async with running_server() as running:
        running.servicer.error = RecursionError(SECRET)
        failure = await rpc_failure(running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5))
        assert type(status_codes.from_rpc_error(failure)) is errors.InternalError
        running.servicer.error = None
        assert (await running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)).model == "test"


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"])
async def test_typed_errors_pass_for_every_kind_of_call(kind: str) -> None:
    async with running_server(errors.PromptEmptyError("nothing to say")) as running:
        failure = await rpc_failure(_call(running.channel, kind))
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
    async with running_server() as running:
        running.servicer.error = errors.InvalidParameterError("prompt", message)
        failure = await rpc_failure(running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5))
    received = status_codes.from_rpc_error(failure)
    assert isinstance(received, errors.InvalidParameterError)
    assert received.field == "prompt"
    assert received.message.endswith("…")


async def test_garbage_instead_of_a_request_is_invalid_input_and_the_next_call_works() -> None:
    async with running_server() as running:
        raw: Any = running.channel.unary_unary(f"/{ENCODER}/Encode")
        failure = await rpc_failure(raw(b"\xff\xff\xff\xff", timeout=5))
        assert type(status_codes.from_rpc_error(failure)) is errors.InvalidInputError
        response = await running.encoder.Encode(pb.EncodeRequest(items=[pb.EncodeItem()]), timeout=5)
        assert len(response.results) == 1


async def test_a_valid_request_id_comes_back_and_an_invalid_one_is_replaced() -> None:
    async with running_server() as running:
        returned = []
        for offered in ("turn:7.a_B", "no spaces allowed", "x" * 129):
            call = running.encoder.GetEncoderInfo(
                pb.GetEncoderInfoRequest(), metadata=(("x-request-id", offered),), timeout=5
            )
            await call
            returned.append(dict(await call.trailing_metadata())["x-request-id"])
        assert returned[0] == "turn:7.a_B"
        assert all(len(str(made_up)) == 32 for made_up in returned[1:])
        assert returned[1] != returned[2]


async def test_of_several_request_ids_none_is_taken() -> None:
    async with running_server() as running:
        metadata = (("x-request-id", "one"), ("x-request-id", "two"))
        call = running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), metadata=metadata, timeout=5)
        await call
        assert len(str(dict(await call.trailing_metadata())["x-request-id"])) == 32


async def test_a_failed_call_returns_its_request_id() -> None:
    async with running_server(ValueError(SECRET)) as running:
        method: Any = running.channel.unary_unary(f"/{KINDS}/UnaryUnary")
        call = method(b"", metadata=(("x-request-id", "r1"),), timeout=5)
        await rpc_failure(call)
        assert dict(await call.trailing_metadata())["x-request-id"] == "r1"


async def test_each_call_leaves_one_access_line_and_its_metrics(log_lines: Any) -> None:
    async with running_server() as running:
        await running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)
        running.servicer.error = errors.UnsupportedError("no")
        await rpc_failure(running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5))
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
    async with running_server() as running:
        call = running.encoder.ReadEmbedding(pb.ReadEmbeddingRequest(), timeout=60)
        await call.read()
        call.cancel()

        async def closed() -> bool:
            return running.servicer.closed_generators == 1

        await until(closed)
        code = {"method": f"/{ENCODER}/ReadEmbedding", "code": "CANCELLED"}
        assert running.telemetry.registry.get_sample_value("lookonce_grpc_requests_total", code) == 1


@pytest.mark.parametrize("way", ["cancels", "runs out of time", "is killed"])
async def test_a_client_that_disconnects_during_a_write_is_no_fault(way: str, log_lines: Any) -> None:
    async with running_server() as running:
        if way == "is killed":
            await _killed_reader(running.service.target)
        else:
            reader = functools.partial(_reader_that_ends, running.service.target, cancels=way == "cancels")
            await asyncio.gather(*(reader() for _ in range(NUM_CALLS)))

        async def counted() -> bool:
            return len([line for line in log_lines() if line["event"] == "rpc"]) == NUM_CALLS

        await until(counted)
    lines = log_lines()
    codes = {"DEADLINE_EXCEEDED", "CANCELLED"} if way == "runs out of time" else {"CANCELLED"}
    assert {line["code"] for line in lines if line["event"] == "rpc"} <= codes
    assert not [line for line in lines if line["level"] in ("warning", "error")]


@pytest.mark.parametrize("way", ["resets its calls", "closes the connection"])
async def test_answers_that_a_client_does_not_take_leave_no_error(way: str, log_lines: Any) -> None:
    """gRPC logs a traceback for each, so that a client could fill the log."""
    streams = range(1, 2 * NUM_CALLS, 2)
    async with running_server() as running:
        with raw_calls.connect(running.service.target) as connection:
            connection.sendall(b"".join(raw_calls.call(stream, f"/{KINDS}/Large") for stream in streams))

            async def all_are_being_sent() -> bool:
                return len([line for line in log_lines() if line["event"] == "rpc"]) == NUM_CALLS

            await until(all_are_being_sent)
            if way == "resets its calls":
                connection.sendall(b"".join(raw_calls.reset(stream) for stream in streams))
                await asyncio.to_thread(raw_calls.wait_until_read, connection)
        await running.health_of("")
    assert [line for line in log_lines() if line["level"] == "error"] == []


async def test_an_answer_that_is_too_large_to_send_is_an_error(log_lines: Any) -> None:
    async with running_server(max_message_bytes=MIB) as running:
        method: Any = running.channel.unary_unary(f"/{KINDS}/Large")
        failure = await rpc_failure(method(b"", timeout=5))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    (error,) = [line for line in log_lines() if line["level"] == "error"]
    assert error["logger"] == "grpc._cython.cygrpc"


async def _reader_that_ends(target: str, *, cancels: bool) -> None:
    """Reads one message, so that unread messages fill the connection and the server's next write has to wait."""
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        await channel.channel_ready()
        method: Any = channel.unary_stream(f"/{KINDS}/Flood")
        call = method(b"", timeout=60 if cancels else 4.0)
        await call.read()
        await asyncio.sleep(0.2)
        if cancels:
            call.cancel()
        else:
            await asyncio.sleep(4.0)


async def _killed_reader(target: str) -> None:
    """Runs a process that reads one message of each of its calls, and kills it while the server has to wait."""
    arguments = (sys.executable, "-c", READER, target, f"/{KINDS}/Flood", str(NUM_CALLS))
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"read\n"
    await asyncio.sleep(0.2)
    process.kill()
    await process.wait()


async def test_the_default_deadline_also_ends_a_stream_whose_reader_has_stopped(log_lines: Any) -> None:
    async with running_server(default_timeouts_s={"Flood": 0.3}) as running:
        method: Any = running.channel.unary_stream(f"/{KINDS}/Flood")
        call = method(b"")
        await call.read()

        async def ended() -> bool:
            return any(line["event"] == "rpc" for line in log_lines())

        # The reader reads on only when the server has given up.
        await asyncio.sleep(0.6)
        failure = await rpc_failure(_drained(call))
        await until(ended)
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert type(status_codes.from_rpc_error(failure)) is errors.DeadlineError
    assert [line["code"] for line in log_lines() if line["event"] == "rpc"] == ["DEADLINE_EXCEEDED"]


async def test_a_deadline_of_the_caller_counts_instead_of_the_default() -> None:
    async with running_server(default_timeouts_s={"Flood": 0.01}) as running:
        method: Any = running.channel.unary_stream(f"/{KINDS}/Flood")
        call = method(b"", timeout=60)
        until_s = asyncio.get_running_loop().time() + 0.2
        while asyncio.get_running_loop().time() < until_s:
            assert await call.read()
        call.cancel()


async def _drained(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
    if await call.code() is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
