"""Applies a coroutine function to a stream of items, a bounded number at a time, results as they are ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


async def map_concurrently(
    items: AsyncIterator[ItemT], work: Callable[[ItemT], Coroutine[Any, Any, ResultT]], limit: int
) -> AsyncGenerator[ResultT, None]:
    """Yields one result per item in order of completion. Reads the next item only while fewer than `limit` run.

    Raises the exceptions of `work` and of the stream. Leaves no task running, however it ends.
    """
    running: set[asyncio.Task[ResultT]] = set()
    # At most one.
    reading: set[asyncio.Task[ItemT | None]] = set()
    has_more = True
    # A task keeps its exception, whose traceback refers to this frame, and so to the items. A local variable with the
    # task would make that a cycle, which keeps images in memory until the next garbage collection.
    try:
        while has_more or running:
            if has_more and not reading and len(running) < limit:
                reading.add(asyncio.create_task(_next_or_none(items)))
            await asyncio.wait({*running, *reading}, return_when=asyncio.FIRST_COMPLETED)
            if any(task.done() for task in reading):
                item = reading.pop().result()
                if item is None:
                    has_more = False
                else:
                    running.add(asyncio.create_task(work(item)))
                # The frame waits for the next item, perhaps for long, and must not keep this one meanwhile.
                del item
            num_done = sum(task.done() for task in running)
            for _ in range(num_done):
                yield _taken(running).result()
    finally:
        _cancel_all((*running, *reading))
        await asyncio.gather(*running, *reading, return_exceptions=True)
        running.clear()
        reading.clear()


def _taken(tasks: set[asyncio.Task[ResultT]]) -> asyncio.Task[ResultT]:
    """Removes and returns a task that is done."""
    done = next(task for task in tasks if task.done())
    tasks.discard(done)
    return done


def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


async def _next_or_none(items: AsyncIterator[ItemT]) -> ItemT | None:
    return await anext(items, None)
