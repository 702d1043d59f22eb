"""Turns for the items of calls on the event loop: tenants and calls share it, and few items are begun in a pass of it.

A call of a few kilobytes may name 64 images or 256 keys. Each costs the event loop 0.2 ms, so 200 such calls that begin
all their items at once stop it for seconds. Here an item needs a place before it does anything, and there are few
places. They are given in the order of `cost_turns.py`. While many calls wait, one place is given in a pass of the event
loop, so that other calls run in between: gRPC hands over one call in a pass, and a health check may be behind hundreds.

An item gives its place back before it waits for other items, such as for a thread that takes turns itself, or for the
encode that it joins. Otherwise the items that hold all places could wait for one that gets none.

Event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from lookonce.turns.cost_turns import TurnRequest
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.grants import Grants

# Items at work at a time: one for each thread that asks the shared cache, in both services.
_NUM_PLACES = 4
# While no more calls than this wait, all free places are given at once: one call alone is not slowed down.
_NUM_UNPACED = 4

ResultT = TypeVar("ResultT")


class Place:
    """One of the places, for one item. Made without one."""

    __slots__ = ("_caller", "_cost", "_is_held", "_turns")

    def __init__(self, turns: ItemTurns, caller: CallerId, cost: int) -> None:
        self._turns = turns
        self._caller = caller
        self._cost = cost
        self._is_held = False

    async def take(self) -> None:
        """Waits for the item's turn unless it has a place. Cancelling the caller gives up the wait."""
        if not self._is_held:
            await self._turns._wait(self._caller, self._cost)
            self._is_held = True

    def give_back(self) -> None:
        """Lets the next item begin if this one has a place."""
        if self._is_held:
            self._is_held = False
            self._turns._give_back()

    @asynccontextmanager
    async def left(self) -> AsyncIterator[None]:
        """Gives the place back during the block, in which the item waits, and waits for another turn after it."""
        self.give_back()
        yield
        await self.take()

    async def __aenter__(self) -> Self:
        await self.take()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give_back()


class ItemTurns:
    """The places of one service, and the items that wait for one."""

    def __init__(self, num_places: int = _NUM_PLACES) -> None:
        self._num_free = num_places
        # Whether an item was begun in this pass of the event loop.
        self._has_begun = False
        self._numbers = itertools.count()
        self._grants = Grants(self._has_room, self._count)

    def place(self, caller: CallerId, cost: int = 1) -> Place:
        """Returns the place of a new item, which is taken later. `async with` takes it and gives it back.

        `cost` is the number of look-ups that the item stands for.
        """
        return Place(self, caller, cost)

    async def run_one(
        self, caller: CallerId, item: Callable[[Place], Coroutine[Any, Any, ResultT]], cost: int = 1
    ) -> ResultT | BaseException:
        """Calls a single item with a place and returns its result or exception, as `run_all` does, but without a task.

        That is 25 µs faster.
        """
        async with self.place(caller, cost) as place:
            try:
                return await item(place)
            except Exception as error:
                return error

    async def run_all(
        self,
        caller: CallerId,
        items: Iterable[Callable[[Place], Coroutine[Any, Any, ResultT]]],
        costs: Iterable[int] | None = None,
        ends_all: tuple[type[Exception], ...] = (),
    ) -> list[ResultT | BaseException]:
        """Calls each item with a place and returns their results or exceptions, in order.

        `costs` has the number of look-ups that each item stands for; None: one each. An item that fails with one of
        `ends_all` ends the others: those that have begun are cancelled, with CancelledError as their result, and the
        rest has no result.

        Each item runs in a task of its own, which is created when its turn has come: what has not begun costs nothing.
        Items may give their places back early. Cancelling the caller cancels those that have begun, and waits for them.
        """
        tasks: list[asyncio.Task[ResultT]] = []
        is_over = False

        def note_end(task: asyncio.Task[ResultT]) -> None:
            nonlocal is_over
            if not is_over and not task.cancelled() and isinstance(task.exception(), ends_all):
                is_over = True
                for other in tasks:
                    other.cancel()

        try:
            for item, cost in zip(items, itertools.repeat(1) if costs is None else costs, strict=False):
                place = self.place(caller, cost)
                await place.take()
                if is_over:
                    place.give_back()
                    break
                tasks.append(asyncio.create_task(item(place)))
                # Also a task that is cancelled before it runs gives its place back.
                tasks[-1].add_done_callback(partial(_end, place))
                tasks[-1].add_done_callback(note_end)
            return await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            # A task keeps its exception, whose traceback refers to frames that have the images.
            tasks.clear()

    async def _wait(self, caller: CallerId, cost: int) -> None:
        await self._grants.wait(TurnRequest(caller, next(self._numbers), cost))

    def _give_back(self) -> None:
        self._count(-1)
        self._grants.give()

    def _has_room(self) -> bool:
        return self._num_free > 0 and (not self._has_begun or len(self._grants) <= _NUM_UNPACED)

    def _count(self, change: int) -> None:
        self._num_free -= change
        if change > 0 and not self._has_begun:
            self._has_begun = True
            asyncio.get_running_loop().call_soon(self._begin_next)

    def _begin_next(self) -> None:
        self._has_begun = False
        self._grants.give()


def _end(place: Place, task: asyncio.Task[Any]) -> None:
    place.give_back()
