"""Calls that their clients drop at once cost little, and one connection can queue only so many of them.

The tests keep the event loop busy while a client of another process sends its calls. So all of them wait in gRPC when
the event loop goes on, as they do on a server that cannot keep up.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lookonce.encoder.v1 import encoder_service_pb2 as pb
from tests.lookonce.server.running_server import ENCODER, Running, running_server, until
from tests.otlp_collector import Traces, traced_process

ROOT = pathlib.Path(__file__).parents[3]
METHOD = f"/{ENCODER}/GetEncoderInfo"
MAX_CALLS = 256
NUM_TIMES = 8
# Calls of an honest client end when all of them have come.
NUM_ROUNDS = 12
# Makes calls with a deadline, and prints their codes.
LATE_CLIENT = """
import json, sys, grpc
from lookonce.encoder.v1 import encoder_service_pb2 as pb, encoder_service_pb2_grpc as pb_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    grpc.channel_ready_future(channel).result(60)
    stub = pb_grpc.EncoderServiceStub(channel)
    calls = [stub.GetEncoderInfo.future(pb.GetEncoderInfoRequest(), timeout=1) for _ in range(int(sys.argv[2]))]
    print(json.dumps([call.code().name for call in calls]))
"""
# Callers that make a call after the other and try none again. Prints the codes of all calls.
BUSY_CLIENT = """
import asyncio, json, sys, grpc
from lookonce.encoder.v1 import encoder_service_pb2 as pb, encoder_service_pb2_grpc as pb_grpc
codes = []
async def main():
    async with grpc.aio.insecure_channel(sys.argv[1], options=[("grpc.enable_retries", 0)]) as channel:
        stub = pb_grpc.EncoderServiceStub(channel)
        async def call_again_and_again():
            for _ in range(int(sys.argv[3])):
                call = stub.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60)
                codes.append((await call.code()).name)
        await asyncio.gather(*(call_again_and_again() for _ in range(int(sys.argv[2]))))
asyncio.run(main())
print(json.dumps(codes))
"""


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced_process() as started:
        yield started


def output_of(*arguments: str) -> str:
    """Runs a client, which keeps the event loop busy, and returns what it prints."""
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    return ended.stdout


def num_dropped(running: Running, *codes: str) -> int:
    """Returns how many calls have ended before they started."""
    value = running.telemetry.registry.get_sample_value
    counts = [value("lookonce_grpc_dropped_requests_total", {"method": METHOD, "code": code}) for code in codes]
    return int(sum(count or 0 for count in counts))


async def all_have_ended(running: Running) -> None:
    """Makes an honest call, which gRPC hands over after those before it, and waits for the end of all calls."""
    await running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60)
    turns = running.service._turns

    async def none_is_left() -> bool:
        return not turns._waiting and not turns._num_in_progress and not running.service._calls._calls

    await until(none_is_left)


async def test_a_connection_cannot_queue_more_calls_by_resetting_them(log_lines: Any) -> None:
    async with running_server() as running:
        program = "tests.lookonce.server.raw_calls"
        output_of("-m", program, running.service.target, METHOD, str(NUM_TIMES), str(MAX_CALLS))
        await all_have_ended(running)
        dropped = num_dropped(running, "CANCELLED", "DEADLINE_EXCEEDED")
    num_lines = len(lines_of(log_lines, "CANCELLED"))
    assert MAX_CALLS < dropped + num_lines <= 2 * MAX_CALLS + 1, "the honest call waited for these only"
    assert num_lines < dropped


async def test_dropped_calls_leave_one_count_and_neither_access_line_nor_span(log_lines: Any, traces: Traces) -> None:
    async with running_server() as running:
        codes = output_of("-c", LATE_CLIENT, running.service.target, "100")
        await all_have_ended(running)
        dropped = num_dropped(running, "DEADLINE_EXCEEDED")
    assert json.loads(codes) == ["DEADLINE_EXCEEDED"] * 100
    assert 0 < dropped <= 100, "a busy client may not have sent all in time"
    assert [line["code"] for line in log_lines() if line["event"] == "rpc"] == ["OK"], "that of the honest call"
    assert len(traces.collected().named(METHOD.strip("/"))) == 1


async def test_calls_that_end_all_at_once_make_room_for_as_many() -> None:
    """The client starts the next calls before the server has cleaned up after the first ones."""
    async with running_server() as running:
        running.servicer.gathering = asyncio.Barrier(MAX_CALLS)
        command = [sys.executable, "-c", BUSY_CLIENT, running.service.target, str(MAX_CALLS), str(NUM_ROUNDS)]
        client = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        printed, _ = await asyncio.wait_for(client.communicate(), 60)
    assert json.loads(printed) == ["OK"] * MAX_CALLS * NUM_ROUNDS


def lines_of(log_lines: Callable[[], list[dict[str, Any]]], code: str) -> list[dict[str, Any]]:
    return [line for line in log_lines() if line["event"] == "rpc" and line["code"] == code]
