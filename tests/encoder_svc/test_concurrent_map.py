"""Results come as they are ready, and no more items are in progress than allowed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from encoder_svc.concurrent_map import map_concurrently


async def count(stop: int) -> AsyncIterator[int]:
    """Yields the numbers from 0 to stop − 1."""
    for number in range(stop):
        yield number


async def test_results_come_in_order_of_completion() -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def work(index: int) -> int:
        await gates[index].wait()
        return index

    results = map_concurrently(count(3), work, limit=3)
    gates[2].set()
    assert await anext(results) == 2
    gates[0].set()
    assert await anext(results) == 0
    gates[1].set()
    assert [index async for index in results] == [1]


async def test_at_most_limit_items_are_in_work() -> None:
    running, most = 0, 0

    async def work(index: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return index

    assert sorted([index async for index in map_concurrently(count(20), work, limit=3)]) == list(range(20))
    assert most == 3


async def test_no_item_is_read_before_there_is_room_for_it() -> None:
    read: list[int] = []
    gates = [asyncio.Event() for _ in range(6)]

    async def items() -> AsyncIterator[int]:
        for number in range(6):
            read.append(number)
            yield number

    async def work(index: int) -> int:
        await gates[index].wait()
        return index

    results = map_concurrently(items(), work, limit=3)
    gates[1].set()
    assert await anext(results) == 1
    assert read == [0, 1, 2]
    for gate in gates:
        gate.set()
    # Nobody takes results, so items in progress end and no other one begins.
    for _ in range(20):
        await asyncio.sleep(0)
    assert read == [0, 1, 2]
    assert sorted([index async for index in results]) == [0, 2, 3, 4, 5]


async def test_a_consumer_that_leaves_leaves_no_task_behind() -> None:
    async def hang(index: int) -> int:
        if index:
            await asyncio.Event().wait()
        return index

    results = map_concurrently(count(5), hang, limit=4)
    assert await anext(results) == 0
    await results.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failing_item_ends_the_map_and_its_tasks() -> None:
    async def work(index: int) -> int:
        if index == 1:
            raise ValueError("one")
        await asyncio.Event().wait()
        return index

    with pytest.raises(ValueError, match="one"):
        async for _ in map_concurrently(count(3), work, limit=3):
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_no_items_give_no_results() -> None:
    async def work(index: int) -> int:
        return index

    assert [index async for index in map_concurrently(count(0), work, limit=1)] == []
