"""Tenants and calls take turns, a wait can be given up, and no thread is lost, whoever leaves."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import weakref
from collections.abc import AsyncIterator

import pytest

from lookonce.turns.cost_turns import TurnRequest
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.turn_threads import TurnThreads

TIMEOUT_S = 30
_numbers = itertools.count()


def turn(tenant: str, request_id: str = "one") -> TurnRequest:
    """Asks for a turn for one more piece of a call's work."""
    return TurnRequest(CallerId(tenant, request_id), next(_numbers), 1)


@pytest.fixture
async def threads() -> AsyncIterator[TurnThreads]:
    """Threads in which pieces are done one at a time."""
    threads = TurnThreads(1, "test")
    yield threads
    await asyncio.to_thread(threads.close)


async def idle() -> None:
    """Lets every task run until it waits again."""
    for _ in range(10):
        await asyncio.sleep(0)


async def order_of(threads: TurnThreads, calls: list[str]) -> list[str]:
    """The order of pieces that come while the only thread is busy; each is named by its tenant and its call."""
    gate = threading.Event()
    read: list[str] = []
    busy = asyncio.create_task(threads.run(turn("busy"), gate.wait, TIMEOUT_S))
    await idle()
    waiting = [asyncio.create_task(threads.run(turn(call[0], call), read.append, call)) for call in calls]
    await idle()
    assert not read
    gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(busy, *waiting)
    return read


async def test_another_tenant_does_not_wait_for_all_pieces_of_the_first(threads: TurnThreads) -> None:
    assert await order_of(threads, ["a1"] * 64 + ["b1", "b1"]) == ["a1", "b1", "a1", "b1"] + ["a1"] * 62


async def test_calls_of_a_tenant_take_turns(threads: TurnThreads) -> None:
    assert await order_of(threads, ["a1", "a1", "a1", "a2"]) == ["a1", "a2", "a1", "a1"]


async def test_a_piece_whose_caller_has_left_is_not_begun_and_its_arguments_are_not_kept(threads: TurnThreads) -> None:
    class File:
        """A stand-in for the bytes of a file."""

    gate = threading.Event()
    read: list[File] = []
    busy = asyncio.create_task(threads.run(turn("a"), gate.wait, TIMEOUT_S))
    await idle()
    file = File()
    reference = weakref.ref(file)
    leaving = [asyncio.create_task(threads.run(turn("a"), read.append, file))]
    del file
    await idle()
    gc.disable()
    try:
        leaving.pop().cancel()
        await idle()
        assert reference() is None
    finally:
        gc.enable()
    gate.set()
    await busy
    assert not read


async def test_a_failure_reaches_the_caller_and_a_call_that_was_left_keeps_its_thread_until_its_end(
    threads: TurnThreads,
) -> None:
    def fail() -> None:
        assert gate.wait(TIMEOUT_S)
        raise ValueError("broken")

    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    gate = threading.Event()
    left = asyncio.create_task(threads.run(turn("a"), fail))
    await idle()
    left.cancel()
    next_one = asyncio.create_task(threads.run(turn("a"), fail))
    await idle()
    assert (left.done(), next_one.done()) == (True, False)
    gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ValueError, match="broken"):
            await next_one
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("seed", range(10))
async def test_no_thread_is_lost_whoever_leaves(seed: int) -> None:
    rng = random.Random(seed)
    threads = TurnThreads(3, "test")
    running, most = [0], [0]
    lock = threading.Lock()

    def read() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        threading.Event().wait(0.001)
        with lock:
            running[0] -= 1

    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        if rng.random() < 0.6 or not tasks:
            tasks.append(asyncio.create_task(threads.run(turn(rng.choice("abc"), rng.choice("12")), read)))
        else:
            rng.choice(tasks).cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0, 0.001)))
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(threads.run(turn("a"), read) for _ in range(10)))
    await idle()
    assert (most[0], threads._num_free, len(threads._grants._waiting)) == (3, 3, 0)
    await asyncio.to_thread(threads.close)


async def test_all_that_wait_for_closed_threads_are_told(threads: TurnThreads) -> None:
    gate = threading.Event()
    busy = asyncio.create_task(threads.run(turn("a"), gate.wait, TIMEOUT_S))
    await idle()
    waiting = [asyncio.create_task(threads.run(turn("b"), gate.wait, TIMEOUT_S)) for _ in range(3)]
    await idle()
    threads.close(wait=False)
    gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert await busy
        found = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in found} == {RuntimeError}
    assert (threads._num_free, len(threads._grants._waiting)) == (1, 0)
