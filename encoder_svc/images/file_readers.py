"""Threads in which image files are hashed and their headers are read, before the files wait for a decoding process.

Each takes some milliseconds, and up to 30 ms for a PNG with much compressed text, so a call of 64 such files keeps two
processors busy for a second. Tenants and calls therefore take turns here, as they do for decoding; each file counts the
same. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lookonce.turns.caller_order import Turn
from lookonce.turns.cost_turns import TurnRequest
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.turn_threads import TurnThreads

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")

# With four threads on two processors a small picture waited no less beside calls of 64 such files (2026-11-23).
_NUM_THREADS = 2


class FileReaders:
    """A few threads, and the files that wait for one of them."""

    def __init__(self) -> None:
        self._threads = TurnThreads(_NUM_THREADS, "read")

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
        return await self._threads.run(TurnRequest(turn.caller, turn.number, 1), function, *arguments, **keywords)

    def close(self) -> None:
        """Waits for the calls in progress and drops the others."""
        self._threads.close()
