"""One computation per key at a time, shared by everybody who asks meanwhile. Event loop only, no locks.

The task belongs to this object, not to the first caller: cancelling any caller, the first included, cancels nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


class SingleFlight(Generic[ResultT]):
    """The tasks in flight, by key."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[ResultT]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tasks

    async def start(
        self,
        key: Hashable,
        work: Callable[ArgumentsT, Coroutine[Any, Any, ResultT]],
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """Starts `work(*arguments)` under a key that has none in flight, and waits for its result."""
        assert key not in self._tasks, "a key has one task at a time"
        self._tasks[key] = asyncio.create_task(work(*arguments, **keywords))
        self._tasks[key].add_done_callback(lambda done: self._landed(key, done))
        # No local variable has the task: it keeps its exception, whose traceback refers to this frame, and so to the
        # arguments. Such a cycle would keep an image in memory until the next garbage collection.
        return await self.join(key)

    async def join(self, key: Hashable) -> ResultT:
        """Waits for the result of a key that is in flight; raises what its task raises."""
        return await asyncio.shield(self._tasks[key])

    async def close(self) -> None:
        """Cancels every task and waits for their ends; their callers get CancelledError."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: Hashable, task: asyncio.Task[ResultT]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            # Marks the exception as retrieved: when all callers have left, asyncio would report it as lost.
            task.exception()
