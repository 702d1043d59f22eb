"""Threads for pieces of work that take turns by tenant, cost and call, in the order of `cost_turns.py`.

A piece that has begun is not interrupted. So the longest piece is what others may have to wait for, and callers cut
their work accordingly. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from lookonce.threads import begin_in_thread
from lookonce.turns.cost_turns import TurnRequest
from lookonce.turns.grants import Grants

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


class TurnThreads:
    """A few threads, and the pieces of work that wait for one of them."""

    def __init__(self, num_threads: int, name: str) -> None:
        """`name` is the beginning of the threads' names."""
        self._num_free = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._grants = Grants(lambda: self._num_free > 0, self._count)

    async def run(
        self,
        request: TurnRequest,
        function: Callable[ArgumentsT, ResultT],
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """Calls `function` in a thread when it is the turn of this piece of work.

        Cancelling the caller gives up a wait. A piece that has begun keeps its thread until it ends. Raises
        RuntimeError if the threads are closed.
        """
        await self._grants.wait(request)
        try:
            running = begin_in_thread(self._threads, function, *arguments, **keywords)
        except RuntimeError:
            # The threads are closed. The next one that waits learns it, too.
            self._num_free += 1
            self._grants.give()
            raise
        running.add_done_callback(self._give_back)
        try:
            return await asyncio.shield(running)
        finally:
            # The future keeps its exception, whose traceback refers to this frame, and so to the arguments.
            del running

    def close(self, *, wait: bool = True) -> None:
        """Drops the pieces that have not begun. Waits for those in progress unless `wait` is False."""
        self._threads.shutdown(wait=wait, cancel_futures=True)

    def _count(self, change: int) -> None:
        self._num_free -= change

    def _give_back(self, running: asyncio.Future[Any]) -> None:
        self._num_free += 1
        self._grants.give()
        if not running.cancelled():
            # Marks the exception as retrieved: if the caller has left, asyncio would report it as lost.
            running.exception()
