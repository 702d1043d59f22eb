"""Threads in which image files are hashed and their headers are read, before the files wait for a decoding process.

Each takes some milliseconds, and up to 30 ms for a PNG with much compressed text, so a call of 64 such files keeps two
processors busy for a second. Tenants and calls therefore take turns here, as they do for decoding; each file counts the
same. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from encoder_svc.fair_queue import CallerId
from encoder_svc.images.decode_turns import DecodeRequest
from encoder_svc.images.grants import Grants
from lookonce.caller_order import Turn
from lookonce.threads import run_in_thread

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")

# With four threads on two processors a small picture waited no less beside calls of 64 such files (2026-11-23).
_NUM_THREADS = 2


class FileReaders:
    """A few threads, and the files that wait for one of them."""

    def __init__(self, num_threads: int = _NUM_THREADS) -> None:
        self._num_free = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="read")
        self._grants = Grants(lambda: self._num_free > 0, self._count)

    async def run(
        self,
        turn: Turn[CallerId],
        function: Callable[ArgumentsT, ResultT],
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """Calls `function` in a thread when it is the turn of this image's tenant and call.

        An image has one call here at a time. Cancelling the caller gives up a wait, and ends no call that has begun.
        """
        await self._grants.wait(DecodeRequest(turn.caller, turn.number, num_pixels=0))
        running = asyncio.ensure_future(run_in_thread(self._threads, function, *arguments, **keywords))
        running.add_done_callback(self._give_back)
        try:
            return await asyncio.shield(running)
        finally:
            # The task keeps its exception, whose traceback refers to this frame, and so to the file.
            del running

    def close(self) -> None:
        """Waits for the calls in progress and drops the others."""
        self._threads.shutdown(cancel_futures=True)

    def _count(self, change: int) -> None:
        self._num_free -= change

    def _give_back(self, running: asyncio.Task[Any]) -> None:
        self._num_free += 1
        self._grants.give()
        if not running.cancelled():
            # Marks the exception as retrieved: if the caller has left, asyncio would report it as lost.
            running.exception()
