"""Silent callers take the place of each other, and honest calls never wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from lookonce.errors import DeadlineError, OverloadedError
from lookonce.server.receiving.unfinished_reads import ReadLimits, UnfinishedReads
from tests.lookonce.server.receiving import virtual_time

LIMITS = ReadLimits(max_reads=4, max_reads_of_caller=2, sure_s=0.05, max_receive_s=30.0)


@contextlib.asynccontextmanager
async def silent_reads(
    limits: ReadLimits, *callers: str
) -> AsyncIterator[tuple[UnfinishedReads, list[asyncio.Task[None]]]]:
    """Yields reads without a message, which have begun in the order of `callers`."""
    reads = UnfinishedReads(limits)
    tasks = []
    for caller in callers:
        tasks.append(asyncio.create_task(reads.receive(caller, _nothing, may_pause=False)))
        await asyncio.sleep(0)
    yield reads, tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert reads.num_reads == 0


async def _nothing() -> None:
    await asyncio.sleep(3600)


async def _message() -> bytes:
    await asyncio.sleep(0)
    return b"message"


async def _slow_message() -> bytes:
    await asyncio.sleep(0.04)
    return b"message"


async def done_first(tasks: list[asyncio.Task[None]]) -> list[bool]:
    await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    return [task.done() for task in tasks]


@virtual_time.throughout
async def test_the_oldest_read_of_the_caller_with_the_most_ends() -> None:
    async with silent_reads(LIMITS, "a", "b", "c", "b", "d") as (reads, tasks):
        assert await done_first(tasks) == [False, True, False, False, False]
        assert reads.num_reads == 4
        with pytest.raises(OverloadedError):
            await tasks[1]


@virtual_time.throughout
async def test_a_caller_has_a_limit_of_its_own() -> None:
    async with silent_reads(LIMITS, "a", "a", "a") as (reads, tasks):
        assert await done_first(tasks) == [True, False, False]
        assert reads.num_reads == 2


@virtual_time.throughout
async def test_fresh_reads_of_others_neither_end_an_older_one_nor_shield_it() -> None:
    limits = ReadLimits(max_reads=2, max_reads_of_caller=2, sure_s=0.1, max_receive_s=30.0)
    async with silent_reads(limits, "slow") as (reads, tasks):

        async def with_fresh_reads(num_rounds: int) -> None:
            for _ in range(num_rounds):
                keen = [reads.receive("keen", _slow_message, may_pause=False) for _ in range(4)]
                await asyncio.gather(*keen)

        await with_fresh_reads(10)
        assert not tasks[0].done()
        tasks += [asyncio.create_task(reads.receive(caller, _nothing, may_pause=False)) for caller in "ab"]
        await with_fresh_reads(10)
        assert [task.done() for task in tasks] == [True, False, False]


@virtual_time.throughout
async def test_honest_reads_beside_silent_ones_get_their_messages() -> None:
    async with silent_reads(LIMITS, *"aaaaaaaabcdefghi") as (reads, _):
        for caller in "aaxy" * 20:
            assert await reads.receive(caller, _message, may_pause=False) == b"message"
            await asyncio.sleep(0.005)


def test_a_review_of_many_callers_takes_one_pass() -> None:
    async def cost_of(num_callers: int) -> int:
        async with silent_reads(LIMITS, *map(str, range(num_callers))) as (reads, _):
            await asyncio.sleep(LIMITS.sure_s / 2)
            asyncio.get_running_loop().time = lambda: 2000.0  # type: ignore[method-assign]
            return virtual_time.num_function_calls(reads._review)

    small, large = (virtual_time.run(cost_of(num_callers)) for num_callers in (100, 800))
    assert large < 12 * small


@virtual_time.throughout
async def test_reads_at_once_beyond_the_number_get_their_messages() -> None:
    reads = UnfinishedReads(LIMITS)
    answers = await asyncio.gather(*(reads.receive("a", _message, may_pause=False) for _ in range(100)))
    assert answers == [b"message"] * 100
    assert reads.num_reads == 0


@virtual_time.throughout
async def test_a_message_must_come_in_time_except_between_messages_of_a_stream() -> None:
    reads = UnfinishedReads(ReadLimits(max_reads=4, max_reads_of_caller=2, sure_s=0.05, max_receive_s=0.1))
    stream = asyncio.create_task(reads.receive("a", _nothing, may_pause=True))
    with pytest.raises(DeadlineError):
        await reads.receive("a", _nothing, may_pause=False)
    await asyncio.sleep(10)
    assert not stream.done()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert reads.num_reads == 0
