"""A drain waits for the calls that delay it, refuses new ones, and ends those that take too long."""

from __future__ import annotations

import asyncio
import time

import pytest

from lookonce.errors import UnavailableError
from lookonce.server.admission import inflight_calls
from lookonce.server.admission.inflight_calls import InflightCalls
from lookonce.server.admission.send_queues import SendQueues
from tests.lookonce.server.receiving import virtual_time


@pytest.fixture(autouse=True)
def _no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes a thread, for which virtual time does not wait."""

    async def look(_: SendQueues) -> list[object]:
        return []

    monkeypatch.setattr(SendQueues, "look", look)


class Handler:
    """A call that lasts until it is released."""

    def __init__(self, calls: InflightCalls, *, delays_drain: bool = True) -> None:
        self.release = asyncio.Event()
        self.task = asyncio.create_task(self._run(calls, delays_drain))

    async def _run(self, calls: InflightCalls, delays_drain: bool) -> str:
        async with calls.admitted(delays_drain=delays_drain):
            await self.release.wait()
        return "answered"


async def started(*handlers: Handler) -> None:
    await asyncio.sleep(0)
    assert not any(handler.task.done() for handler in handlers)


async def test_without_calls_a_drain_has_nothing_to_wait_for() -> None:
    calls = InflightCalls()
    assert calls.num_delaying == 0
    assert await calls.finished(60.0)
    assert await calls.finished(0)


async def test_a_drain_without_any_time_is_over_only_when_nothing_delays_it() -> None:
    calls = InflightCalls()
    handler = Handler(calls)
    await started(handler)
    assert not await calls.finished(0)
    handler.release.set()
    await handler.task
    assert await calls.finished(0)


async def test_a_drain_waits_until_the_last_call_has_ended() -> None:
    calls = InflightCalls()
    first, last = Handler(calls), Handler(calls)
    await started(first, last)
    assert calls.num_delaying == 2
    drain = asyncio.create_task(calls.finished(60.0))
    first.release.set()
    assert await first.task == "answered"
    assert not drain.done()
    last.release.set()
    assert await drain
    assert await last.task == "answered"


@virtual_time.throughout
async def test_a_drain_waits_for_a_call_that_writes_unless_one_message_takes_very_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inflight_calls, "STALL_S", 0.5)
    calls, taken = InflightCalls(), asyncio.Event()

    async def stream() -> None:
        async with calls.admitted(delays_drain=True):
            # Each message takes long, and all of them together longer than one may take.
            for _ in range(8):
                await calls.current().written(asyncio.sleep(0.1))
            taken.set()
            await calls.current().written(asyncio.sleep(3600))

    task = asyncio.create_task(stream())
    await asyncio.sleep(0)
    begun_s = asyncio.get_running_loop().time()
    assert not await calls.finished(60.0)
    assert asyncio.get_running_loop().time() - begun_s < 2
    assert taken.is_set()
    assert calls.expel_all() == 1
    with pytest.raises(UnavailableError):
        await task
    await calls.statuses_sent()


class Waiting:
    """A call that waits for its client in one of three ways, without end."""

    def __init__(self, calls: InflightCalls, way: str) -> None:
        self.way = way
        self.is_moved_on = asyncio.Event()
        self.task = asyncio.create_task(self._run(calls))

    async def _run(self, calls: InflightCalls) -> None:
        async with calls.admitted(delays_drain=True) as call:
            if self.way == "receive":
                await call.received(self.is_moved_on.wait())
            elif self.way == "write":
                await call.written(self._written())
        await self.is_moved_on.wait()

    async def _written(self) -> None:
        await self.is_moved_on.wait()


@pytest.mark.parametrize("way", ["receive", "write", "end"])
@virtual_time.throughout
async def test_a_call_that_waited_for_its_client_before_the_drain_gets_the_whole_time(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight_calls, "STALL_S", 1.0)
    calls = InflightCalls()
    waiting = Waiting(calls, way)
    await asyncio.sleep(1.5)
    drain = asyncio.create_task(calls.finished(60.0))
    done, _ = await asyncio.wait({drain}, timeout=0.5)
    assert not done
    waiting.is_moved_on.set()
    assert await drain, "its client has moved it on"
    await waiting.task


@virtual_time.throughout
async def test_calls_that_wait_for_their_clients_hold_no_drain_and_a_working_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call whose client sent nothing made a drain wait for all others, too."""
    monkeypatch.setattr(inflight_calls, "STALL_S", 0.5)
    calls = InflightCalls()
    waiting = [Waiting(calls, way) for way in ("receive", "write", "end")]
    working = Handler(calls)
    await started(working)
    drain = asyncio.create_task(calls.finished(60.0))
    done, _ = await asyncio.wait({drain}, timeout=1.5)
    assert not done
    working.release.set()
    await working.task
    assert not await drain
    assert calls.expel_all() == 2
    # Each round of the wait for statuses once began anew when one of them was sent.
    sent = asyncio.create_task(calls.statuses_sent())
    results = await asyncio.gather(*(one.task for one in waiting[:2]), return_exceptions=True)
    assert [type(result) for result in results] == [UnavailableError] * 2
    assert not sent.done()
    await sent
    assert not waiting[2].task.done()
    waiting[2].is_moved_on.set()
    await waiting[2].task


@virtual_time.throughout
async def test_a_stream_waits_for_its_client_only_when_each_of_its_messages_has_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inflight_calls, "STALL_S", 0.5)
    calls, is_answered = InflightCalls(), asyncio.Event()

    async def stream() -> None:
        async with calls.admitted(delays_drain=True) as call:
            await call.received(asyncio.sleep(0))
            async with asyncio.TaskGroup() as group:
                group.create_task(call.received(asyncio.sleep(3600)))
                await is_answered.wait()
                await call.written(asyncio.sleep(0))

    task = asyncio.create_task(stream())
    drain = asyncio.create_task(calls.finished(60.0))
    done, _ = await asyncio.wait({drain}, timeout=1.5)
    assert not done, "the service works on the first message while it awaits the second one"
    is_answered.set()
    assert not await drain
    assert calls.expel_all() == 1
    with pytest.raises(UnavailableError):
        await task


async def test_health_watches_do_not_delay_a_drain() -> None:
    calls = InflightCalls()
    watch = Handler(calls, delays_drain=False)
    await started(watch)
    assert calls.num_delaying == 0
    assert await calls.finished(60.0)
    assert calls.expel_all() == 0
    with pytest.raises(UnavailableError):
        await watch.task


async def test_new_calls_are_refused_while_admitted_ones_continue() -> None:
    calls = InflightCalls()
    admitted = Handler(calls)
    await started(admitted)
    await calls.refuse_new(0.0)
    calls.answer_refused()
    late = Handler(calls)
    with pytest.raises(UnavailableError, match="shutting down"):
        await late.task
    assert calls.num_delaying == 1
    admitted.release.set()
    assert await admitted.task == "answered"


async def test_refusals_are_held_back_until_all_calls_have_been_handed_over() -> None:
    calls = InflightCalls()
    settling = asyncio.create_task(calls.refuse_new(0.0))
    late = []
    for _ in range(4):
        await asyncio.sleep(0.02)
        late.append(Handler(calls))
    assert not settling.done(), "a call came within each look"
    await settling
    assert not any(handler.task.done() for handler in late), "their callers would send the next ones"
    calls.answer_refused()
    results = await asyncio.gather(*(handler.task for handler in late), return_exceptions=True)
    assert [type(result) for result in results] == [UnavailableError] * 4


def keep_event_loop_busy() -> None:
    time.sleep(0.06)


async def test_calls_that_are_handed_over_in_slow_passes_of_the_event_loop_are_awaited() -> None:
    """One long pass was taken for a silence, and gRPC then cancelled up to 955 of a burst of 1000 calls."""
    calls = InflightCalls()
    settling = asyncio.create_task(calls.refuse_new(0.0))
    late = []
    for _ in range(4):
        for _ in range(5):
            keep_event_loop_busy()
            await asyncio.sleep(0)
        late.append(Handler(calls))
    assert not settling.done()
    await settling
    calls.answer_refused()
    results = await asyncio.gather(*(handler.task for handler in late), return_exceptions=True)
    assert [type(result) for result in results] == [UnavailableError] * 4


@pytest.mark.parametrize("sign", ["a call in progress", "a refused call"])
async def test_clients_that_get_no_processor_for_a_while_are_awaited(sign: str) -> None:
    """The calls of busy clients went on to come after a silence of 50 ms, and up to 552 of 1800 got CANCELLED."""
    calls = InflightCalls()
    if sign == "a call in progress":
        Handler(calls)
        await asyncio.sleep(0)
    settling = asyncio.create_task(calls.refuse_new(0.0))
    await asyncio.sleep(0)
    late = [Handler(calls)] if sign == "a refused call" else []
    for _ in range(2):
        # Looks are never closer than their wait, so that this one has time for 30 of them.
        await asyncio.sleep(30 * inflight_calls._LOOK_S)
        assert not settling.done()
        late.append(Handler(calls))
    await settling
    calls.answer_refused()
    results = await asyncio.gather(*(handler.task for handler in late), return_exceptions=True)
    assert {type(result) for result in results} == {UnavailableError}
    calls.expel_all()


async def test_callers_who_never_pause_do_not_keep_a_drain_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight_calls, "_SETTLE_S", 0.2)
    calls = InflightCalls()
    settling = asyncio.create_task(calls.refuse_new(0.0))
    late = []
    while not settling.done():
        late.append(Handler(calls))
        await asyncio.sleep(0.001)
    calls.answer_refused()
    results = await asyncio.gather(*(handler.task for handler in late), return_exceptions=True)
    assert {type(result) for result in results} == {UnavailableError}


async def test_a_long_hand_over_takes_its_time_from_that_of_calls_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight_calls, "_SETTLE_S", 0.1)
    calls = InflightCalls()
    begun_s = time.monotonic()
    settling = asyncio.create_task(calls.refuse_new(1.2))
    late = []
    while not settling.done():
        late.append(Handler(calls))
        await asyncio.sleep(0.001)
    took_s = time.monotonic() - begun_s
    # A third of the time limit.
    assert took_s >= 0.4
    assert 1.2 - (took_s - 0.1) <= await settling <= 1.2 - 0.3
    calls.answer_refused()
    results = await asyncio.gather(*(handler.task for handler in late), return_exceptions=True)
    assert {type(result) for result in results} == {UnavailableError}


async def test_a_long_time_limit_does_not_keep_refused_callers_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other clients went on to call, refusals waited for a third of the limit: 40 s of two minutes."""
    monkeypatch.setattr(inflight_calls, "_SETTLE_S", 0.1)
    monkeypatch.setattr(inflight_calls, "_MAX_SETTLE_S", 0.3)
    calls = InflightCalls()
    begun_s = time.monotonic()
    settling = asyncio.create_task(calls.refuse_new(15.0))
    late = []
    while not settling.done():
        late.append(Handler(calls))
        await asyncio.sleep(0.02)
    assert 0.3 <= time.monotonic() - begun_s < 4.0
    assert await settling < 15.0 - 0.1
    calls.answer_refused()
    results = await asyncio.gather(*(handler.task for handler in late), return_exceptions=True)
    assert {type(result) for result in results} == {UnavailableError}


async def test_calls_that_take_too_long_end_with_unavailable() -> None:
    calls = InflightCalls()
    handlers = [Handler(calls), Handler(calls), Handler(calls, delays_drain=False)]
    await started(*handlers)
    assert not await calls.finished(0.0)
    assert calls.expel_all() == 2, "the watch did not delay the drain"
    results = await asyncio.gather(*(handler.task for handler in handlers), return_exceptions=True)
    assert [type(result) for result in results] == [UnavailableError] * 3
    assert await calls.finished(60.0)


async def test_a_call_that_its_client_cancels_stays_cancelled() -> None:
    calls = InflightCalls()
    handler = Handler(calls)
    await started(handler)
    handler.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler.task
    assert calls.num_delaying == 0


async def test_a_call_that_fails_is_no_longer_in_flight() -> None:
    calls = InflightCalls()

    async def fail() -> None:
        async with calls.admitted(delays_drain=True):
            raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        await asyncio.create_task(fail())
    assert calls.num_delaying == 0
    assert await calls.finished(60.0)


async def test_the_end_of_a_call_looks_at_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health watches need no token and last. With 25,000 of them, the end of each call had taken 0.6 ms."""
    num_looks = 0

    class Watched(inflight_calls.Call):
        def __getattribute__(self, name: str) -> object:
            nonlocal num_looks
            num_looks += name == "delays_drain"
            return super().__getattribute__(name)

    monkeypatch.setattr(inflight_calls, "Call", Watched)
    calls = InflightCalls()
    watches = [Handler(calls, delays_drain=False) for _ in range(100)]
    handler = Handler(calls)
    await started(*watches, handler)
    num_looks = 0
    handler.release.set()
    await handler.task
    assert num_looks <= 1
    assert await calls.finished(0.0)
    assert calls.expel_all() == 0
    await asyncio.gather(*(watch.task for watch in watches), return_exceptions=True)


async def test_a_call_is_answered_when_its_task_has_ended_which_sends_the_answer() -> None:
    calls, sent = InflightCalls(), asyncio.Event()

    async def answer(*, delays_drain: bool) -> None:
        async with calls.admitted(delays_drain=delays_drain):
            pass
        await sent.wait()

    sending = asyncio.create_task(answer(delays_drain=True))
    watch = asyncio.create_task(answer(delays_drain=False))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(calls.finished(60.0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    watch.cancel()
    sent.set()
    assert await waiting
    await sending


async def test_refused_calls_are_answered_too() -> None:
    calls = InflightCalls()
    await calls.refuse_new(0.0)
    late = Handler(calls)
    await asyncio.sleep(0)
    waiting = asyncio.create_task(calls.finished(60.0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    calls.answer_refused()
    assert await waiting
    assert late.task.done()
    await asyncio.gather(late.task, return_exceptions=True)
