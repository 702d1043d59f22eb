"""Calls of a burst start in turn by connection, and those of an orderly client start at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from lookonce import status_codes
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.errors import OverloadedError
from lookonce.server.admission import call_turns
from lookonce.server.admission.call_turns import CallTurns
from tests.lookonce.server.running_server import CHANNEL_OPTIONS, running_server

FREE = call_turns._NUM_FREE


@contextlib.asynccontextmanager
async def started(turns: CallTurns, caller: str, *, is_working: bool = True) -> AsyncIterator[None]:
    """A call of `caller`, from its arrival to its end."""
    has_waited = await turns.may_start(caller)
    async with turns.in_progress(caller, has_waited=has_waited, is_working=is_working):
        yield


@pytest.fixture(autouse=True)
def _long_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than the interval for the first calls of a burst."""
    monkeypatch.setattr(call_turns, "_INTERVAL_S", 60.0)


class Starts:
    """Calls that wait for their turn and then last for some passes of the event loop; notes who started, in order."""

    def __init__(self, num_passes: int = 3, error: Exception | None = None) -> None:
        self.turns = CallTurns()
        self.callers: list[str] = []
        self.num_ended = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._num_passes = num_passes
        self._error = error

    def add(self, caller: str, num_calls: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._call(caller)) for _ in range(num_calls)]

    async def all_done(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 30)

    async def _call(self, caller: str) -> None:
        async with started(self.turns, caller):
            self.callers.append(caller)
            for _ in range(self._num_passes):
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
        self.num_ended += 1


async def passes(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_calls_of_an_orderly_client_start_at_once() -> None:
    starts = Starts()
    for _ in range(10 * FREE):
        starts.add("a")
        await passes(1)
        assert starts.tasks[-1].done() or len(starts.callers) == len(starts.tasks)
        await starts.all_done()


async def test_connections_with_a_few_calls_each_do_not_wait() -> None:
    starts = Starts()
    for number in range(100):
        starts.add(f"connection {number}", FREE)
    await passes(2)
    assert len(starts.callers) == 100 * FREE


async def test_after_the_first_calls_of_a_burst_others_start_before_the_rest() -> None:
    starts = Starts()
    starts.add("a", 1000)
    starts.add("b", 3)
    starts.add("c")
    await starts.all_done()
    assert Counter(starts.callers) == {"a": 1000, "b": 3, "c": 1}
    assert starts.callers[: FREE + 4] == [*["a"] * FREE, *"bbbc"]


async def test_two_bursts_take_turns() -> None:
    starts = Starts()
    starts.add("a", 500)
    starts.add("b", 500)
    await starts.all_done()
    assert starts.callers[: 2 * FREE + 10] == [*["a"] * FREE, *["b"] * FREE, *"ababababab"]


async def test_a_call_that_comes_later_overtakes_a_burst() -> None:
    starts = Starts()
    starts.add("a", 1000)
    while len(starts.callers) <= 100:
        await asyncio.sleep(0)
    num_started = len(starts.callers)
    starts.add("b")
    await starts.all_done()
    assert starts.callers.index("b") <= num_started + 1
    assert len(starts.callers) == 1001


@pytest.mark.parametrize(
    ("other", "leaves_time"), [("a call that works", True), ("a call that watches", False), ("no call", False)]
)
async def test_a_burst_leaves_time_to_calls_of_other_connections_that_work(other: str, leaves_time: bool) -> None:
    turns = CallTurns()
    num_passes, passes_at_starts = 0, []

    async def call_of_a_burst() -> None:
        async with started(turns, "a"):
            passes_at_starts.append(num_passes)
            # Takes the event loop, as a call's own work does.
            until_s = time.perf_counter() + 0.0005
            while time.perf_counter() < until_s:
                pass
            await passes(3)

    async def count_passes() -> None:
        nonlocal num_passes
        while True:
            await asyncio.sleep(0)
            num_passes += 1

    async def other_call() -> None:
        if other == "no call":
            await count_passes()
        async with started(turns, "b", is_working=other == "a call that works"):
            await count_passes()

    counting = asyncio.create_task(other_call())
    await passes(2)
    await asyncio.gather(*(call_of_a_burst() for _ in range(100)))
    counting.cancel()
    between = [later - earlier for earlier, later in itertools.pairwise(passes_at_starts[FREE:])]
    # The event loop makes thousands of empty passes in the time of a call. A busy machine gets some of the pauses only,
    # and the beginning of a burst is one pause in any case.
    assert (sum(num > 10 for num in between) > 8) == leaves_time


async def test_after_dropped_calls_a_connection_waits_for_its_turn_until_it_drops_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = CallTurns()
    for _ in range(FREE):
        turns.dropped("a")
    assert not await turns.may_start("a")
    turns.dropped("a")
    assert await turns.may_start("a")
    assert not await turns.may_start("b")
    monkeypatch.setattr(turns, "_drop_interval_ends_s", 0.0)
    assert not await turns.may_start("a")
    turns.dropped("a")
    assert not await turns.may_start("a"), "older ones count no more"


async def test_a_call_that_is_dropped_while_it_waits_leaves_nothing() -> None:
    starts = Starts()
    for _ in range(FREE + 1):
        starts.turns.dropped("a")
    starts.add("a", 5)
    await passes(2)
    assert starts.callers == []
    for task in starts.tasks[1:]:
        task.cancel()
    await starts.all_done()
    assert starts.callers == ["a"]
    assert (starts.turns._num_in_progress, starts.turns._waiting) == ({}, {})


async def test_calls_that_end_at_once_with_an_error_are_a_burst_too() -> None:
    """gRPC hands over the next call when this one has been refused, so no two are ever in progress."""
    starts = Starts(num_passes=0, error=OverloadedError("no"))

    async def hand_over() -> None:
        for _ in range(300):
            starts.add("a")
            await passes(2)

    handing = asyncio.create_task(hand_over())
    while len(starts.tasks) < 100:
        await asyncio.sleep(0)
    assert len(starts.callers) <= FREE + 4
    await handing
    await starts.all_done()
    assert len(starts.callers) == 300
    assert all(isinstance(task.exception(), OverloadedError) for task in starts.tasks)


async def test_cancelled_calls_lose_no_turn_of_others() -> None:
    starts = Starts()
    starts.add("a", 300)
    await passes(1)
    for task in starts.tasks[100:]:
        task.cancel()
    starts.add("b")
    await starts.all_done()
    assert Counter(starts.callers) == {"a": 100, "b": 1}
    assert not starts.turns._num_in_progress
    async with asyncio.timeout(10):
        while starts.turns._waiting:
            await asyncio.sleep(0.01)


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


async def test_the_end_starts_all_calls_at_once() -> None:
    starts = Starts()
    starts.add("a", 1000)
    await passes(2)
    assert len(starts.callers) < 1000
    starts.turns.end()
    await passes(1)
    starts.add("a", 100)
    await passes(2)
    assert len(starts.callers) == 1100
    await starts.all_done()


@pytest.mark.parametrize("error", [None, OverloadedError("full")])
async def test_a_burst_over_the_wire_is_answered(error: Exception | None) -> None:
    async with running_server() as running:
        running.servicer.error = error
        calls = [running.encoder.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60) for _ in range(3000)]
        for call in calls[:1000]:
            call.cancel()
        async with grpc.aio.insecure_channel(running.service.target, options=CHANNEL_OPTIONS) as channel:
            other: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)
            expected = grpc.StatusCode.OK if error is None else grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await other.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60).code() is expected
        ends = {(await call.code(), await call.details()) for call in calls[1000:]}
        assert {code for code, _ in ends} == {expected}, ends
        assert {await call.code() for call in calls} <= {expected, grpc.StatusCode.CANCELLED}


@pytest.mark.parametrize("num_connections", [1, 4])
async def test_a_drain_in_the_middle_of_a_burst_leaves_no_call_without_a_reason(num_connections: int) -> None:
    async with running_server() as running, contextlib.AsyncExitStack() as exits:
        channels = [
            await exits.enter_async_context(grpc.aio.insecure_channel(running.service.target, options=CHANNEL_OPTIONS))
            for _ in range(num_connections)
        ]
        stubs: list[pb_grpc.EncoderServiceAsyncStub] = [pb_grpc.EncoderServiceStub(channel) for channel in channels]
        for stub in stubs:
            await stub.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60)
        # No more than a connection may have in progress: further ones wait in the client, and find no server.
        calls = [stub.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=60) for _ in range(250) for stub in stubs]
        await calls[20]
        await running.service.stop()
        ends: Counter[str] = Counter()
        for call in calls:
            try:
                await call
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[repr(status_codes.from_rpc_error(error))] += 1
    assert set(ends) <= {"OK", "UnavailableError('the server is shutting down; retry on another replica')"}
