"""Calls of a burst start in turn by connection, and a few calls start at once."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import grpc.aio

from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.server.admission import call_turns
from lookonce.server.admission.call_turns import CallTurns
from tests.lookonce.server.running_server import CHANNEL_OPTIONS, running_server


class Starts:
    """Calls that wait for their turn; notes who has started, in order."""

    def __init__(self) -> None:
        self.turns = CallTurns()
        self.callers: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, caller: str, num_calls: int = 1) -> None:
        self._tasks += [asyncio.create_task(self._wait(caller)) for _ in range(num_calls)]

    def cancel(self, index: int) -> None:
        self._tasks[index].cancel()

    async def all_done(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), 30)

    async def _wait(self, caller: str) -> None:
        await self.turns.wait(caller)
        self.callers.append(caller)


async def test_a_few_calls_start_at_once() -> None:
    starts = Starts()
    starts.add("a", 5)
    starts.add("b")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert starts.callers == [*"aaaaab"]


async def test_after_a_burst_of_one_connection_the_others_start_next() -> None:
    starts = Starts()
    starts.add("a", 1000)
    starts.add("b", 3)
    starts.add("c")
    await starts.all_done()
    assert Counter(starts.callers) == {"a": 1000, "b": 3, "c": 1}
    unheeded = call_turns._NUM_FREE
    assert starts.callers[:unheeded] == ["a"] * unheeded
    assert starts.callers[unheeded : unheeded + 8] == [*"abcababa"]


async def test_a_call_that_comes_later_overtakes_a_burst() -> None:
    starts = Starts()
    starts.add("a", 1000)
    while len(starts.callers) <= 100:
        await asyncio.sleep(0)
    num_started = len(starts.callers)
    starts.add("b")
    await starts.all_done()
    assert starts.callers.index("b") <= num_started + 2 * call_turns._NUM_AT_ONCE + 1
    assert len(starts.callers) == 1001


async def test_cancelled_calls_lose_no_turn_of_others() -> None:
    starts = Starts()
    starts.add("a", 300)
    await asyncio.sleep(0)
    for index in range(100, 300):
        starts.cancel(index)
    starts.add("b")
    await starts.all_done()
    assert Counter(starts.callers) == {"a": 100, "b": 1}


async def test_calls_start_though_new_ones_never_cease_to_come() -> None:
    starts = Starts()
    starts.add("a", 100)

    async def keep_coming() -> None:
        while True:
            starts.add("a")
            await asyncio.sleep(0)

    coming = asyncio.create_task(keep_coming())
    async with asyncio.timeout(30):
        while len(starts.callers) < 100:
            await asyncio.sleep(0.01)
    coming.cancel()
    await starts.all_done()


async def test_a_burst_of_calls_over_the_wire_is_answered_and_accounted() -> None:
    async with running_server() as running:
        calls = [running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60) for _ in range(3000)]
        async with grpc.aio.insecure_channel(running.service.target, options=CHANNEL_OPTIONS) as channel:
            other: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)
            assert (await other.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60)).model == "test"
        for call in calls[:1000]:
            call.cancel()
        ends = Counter([await call.code() for call in calls])
        assert ends[grpc.StatusCode.OK] >= 2000
        assert set(ends) <= {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}
        assert (await running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60)).model == "test"
