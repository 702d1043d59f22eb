"""Tenants and calls take turns in being read, a wait can be given up, and no thread is lost, whoever leaves."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator

import pytest

from encoder_svc.fair_queue import CallerId
from encoder_svc.images.file_readers import FileReaders
from lookonce.caller_order import Turn

TIMEOUT_S = 30
_numbers = itertools.count()


def turn(tenant: str, request_id: str = "one") -> Turn[CallerId]:
    """The position of one more image of a call."""
    return Turn(CallerId(tenant, request_id), next(_numbers), OrderedDict())


@pytest.fixture
async def readers() -> AsyncIterator[FileReaders]:
    """Files are read one at a time."""
    readers = FileReaders(num_threads=1)
    yield readers
    await asyncio.to_thread(readers.close)


async def idle() -> None:
    """Lets every task run until it waits again."""
    for _ in range(10):
        await asyncio.sleep(0)


async def order_of(readers: FileReaders, calls: list[str]) -> list[str]:
    """The order in which files are read that come while the only thread is busy; each is its tenant and its call."""
    gate = threading.Event()
    read: list[str] = []
    busy = asyncio.create_task(readers.run(turn("busy"), gate.wait, TIMEOUT_S))
    await idle()
    waiting = [asyncio.create_task(readers.run(turn(call[0], call), read.append, call)) for call in calls]
    await idle()
    assert not read
    gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(busy, *waiting)
    return read


async def test_another_tenant_does_not_wait_for_all_files_of_the_first(readers: FileReaders) -> None:
    assert await order_of(readers, ["a1"] * 64 + ["b1", "b1"]) == ["a1", "b1", "a1", "b1"] + ["a1"] * 62


async def test_calls_of_a_tenant_take_turns(readers: FileReaders) -> None:
    assert await order_of(readers, ["a1", "a1", "a1", "a2"]) == ["a1", "a2", "a1", "a1"]


async def test_a_file_whose_caller_has_left_is_not_read_and_not_kept(readers: FileReaders) -> None:
    class File:
        """A stand-in for the bytes of a file."""

    gate = threading.Event()
    read: list[File] = []
    busy = asyncio.create_task(readers.run(turn("a"), gate.wait, TIMEOUT_S))
    await idle()
    file = File()
    reference = weakref.ref(file)
    leaving = [asyncio.create_task(readers.run(turn("a"), read.append, file))]
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
    readers: FileReaders,
) -> None:
    def fail() -> None:
        assert gate.wait(TIMEOUT_S)
        raise ValueError("broken")

    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    gate = threading.Event()
    left = asyncio.create_task(readers.run(turn("a"), fail))
    await idle()
    left.cancel()
    next_one = asyncio.create_task(readers.run(turn("a"), fail))
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
    readers = FileReaders(num_threads=3)
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
            tasks.append(asyncio.create_task(readers.run(turn(rng.choice("abc"), rng.choice("12")), read)))
        else:
            rng.choice(tasks).cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0, 0.001)))
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(readers.run(turn("a"), read) for _ in range(10)))
    await idle()
    assert (most[0], readers._num_free, len(readers._grants._waiting)) == (3, 3, 0)
    await asyncio.to_thread(readers.close)
