"""Applies a coroutine function to a stream of items, a bounded number at a time, results as they are ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
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
    reading: asyncio.Task[ItemT | None] | None = None
    has_more = True
    try:
        while has_more or running:
            if has_more and reading is None and len(running) < limit:
                reading = asyncio.create_task(_next_or_none(items))
            awaited: set[asyncio.Task[Any]] = {*running}
            if reading is not None:
                awaited.add(reading)
            finished, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading in finished:
                item = reading.result()
                reading = None
                if item is None:
                    has_more = False
                else:
                    running.add(asyncio.create_task(work(item)))
            for task in running & finished:
                running.discard(task)
                yield task.result()
    finally:
        tasks = [*running, *([] if reading is None else [reading])]
        for unfinished in tasks:
            unfinished.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next_or_none(items: AsyncIterator[ItemT]) -> ItemT | None:
    return await anext(items, None)
