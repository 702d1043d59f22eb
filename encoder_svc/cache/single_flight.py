"""One computation per key at a time, shared by everybody who asks meanwhile. Event loop only, no locks.

The task belongs to this object, not to the first caller: cancelling any caller, the first included, changes nothing for
the others. When all callers have left, work that only waits is dropped at once, with everything that it holds. Work
that runs goes on: its result can be kept, and a caller who comes meanwhile joins it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

# Callers that hear of the ends of their flights in one pass of the event loop, beside the first of each flight: each
# takes about 0.05 ms to go on, and thousands may share a flight.
_NUM_HEARD = 16

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")


class Flight:
    """One computation in flight, as its own work sees it: the work tells when it only waits and may be dropped."""

    def __init__(self, cancel: Callable[[], bool], remove: Callable[[], object]) -> None:
        """`cancel` cancels the task. `remove` takes the flight out of its table, so that nobody joins it any more."""
        self._cancel = cancel
        self._remove = remove
        # One for each caller.
        self._results: dict[asyncio.Future[Any], None] = {}
        # Ends the present wait; None while the work runs.
        self._end_wait: Callable[[], bool] | None = None
        self._is_dropped = False
        # The error for the callers of work that was dropped; None once they have it.
        self._error: Exception | None = None

    async def result(self) -> Any:
        """Waits for the end of the work as one of its callers. The last one to leave drops work that only waits.

        Each caller has a future of its own: thousands may wait, and asyncio.shield takes time in proportion to all that
        are left whenever one leaves.
        """
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._results[result] = None
        try:
            return await result
        finally:
            del self._results[result]
            # It keeps its exception, whose traceback refers to this frame.
            del result
            if not self._results:
                self.drop()

    def landed(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Hands the end of the task to the next caller in each step, in the order in which they came."""
        for result in list(self._results):
            if result.done():
                continue
            if task.cancelled():
                result.cancel()
            elif (error := task.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(task.result())
            yield

    @contextmanager
    def waiting(self, end_wait: Callable[[], bool] | None = None) -> Iterator[None]:
        """Marks a block in which the work only waits, so that it may be dropped. Blocks are not nested.

        `end_wait` ends the wait with CancelledError, or returns False if it is over already; None cancels the task.
        Raises CancelledError at once if all callers have left by now.
        """
        assert self._end_wait is None, "the work waits for one thing at a time"
        if not self._results and (end_wait is None or end_wait()):
            self._is_dropped = True
            self._remove()
            raise asyncio.CancelledError
        self._end_wait = end_wait or self._cancel
        try:
            yield
        finally:
            self._end_wait = None

    def drop(self, error: Exception | None = None) -> bool:
        """Ends the work if it only waits, and returns whether it did. Callers that are left get `error`."""
        if self._is_dropped or self._end_wait is None or not self._end_wait():
            return False
        self._is_dropped = True
        self._error = error
        self._remove()
        return True

    @property
    def has_error(self) -> bool:
        """Whether the work was dropped with an error for its callers."""
        return self._error is not None

    def take_error(self) -> Exception:
        """Returns the error of `drop` and forgets it: when it is raised, its traceback refers to this object."""
        assert self._error is not None, "the work was dropped with an error"
        try:
            return self._error
        finally:
            self._error = None


class SingleFlight(Generic[ResultT]):
    """The tasks in flight, by key."""

    def __init__(self) -> None:
        # Those that may be joined.
        self._flights: dict[Hashable, Flight] = {}
        # All, with those that were dropped and are about to end.
        self._tasks: dict[Flight, asyncio.Task[ResultT]] = {}
        # Flights that have ended, and whose callers hear of it in turns.
        self._landing: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._flights

    async def start(
        self,
        key: Hashable,
        work: Callable[Concatenate[Flight, ArgumentsT], Coroutine[Any, Any, ResultT]],
        *arguments: ArgumentsT.args,
        **keywords: ArgumentsT.kwargs,
    ) -> ResultT:
        """Starts `work(flight, *arguments)` under a key that has none in flight, and waits for its result."""
        assert key not in self._flights, "a key has one task at a time"
        flight = Flight(partial(self._cancel, key), partial(self._flights.pop, key))
        self._flights[key] = flight
        self._tasks[flight] = asyncio.create_task(_flown(flight, work, *arguments, **keywords))
        self._tasks[flight].add_done_callback(partial(self._landed, key, flight))
        # No local variable has the task: it keeps its exception, whose traceback refers to this frame, and so to the
        # arguments. Such a cycle would keep an image in memory until the next garbage collection.
        return await self.join(key)

    async def join(self, key: Hashable) -> ResultT:
        """Waits for the result of a key that is in flight; raises what its task raises."""
        result: ResultT = await self._flights[key].result()
        return result

    async def close(self) -> None:
        """Cancels every task and waits for their ends; their callers get CancelledError."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, key: Hashable) -> bool:
        return self._tasks[self._flights[key]].cancel()

    def _landed(self, key: Hashable, flight: Flight, task: asyncio.Task[ResultT]) -> None:
        del self._tasks[flight]
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not task.cancelled():
            # Marks the exception as retrieved: when all callers have left, asyncio would report it as lost.
            task.exception()
        landing = flight.landed(task)
        # The first caller began the flight, and nothing else may run before it.
        next(landing, None)
        if not self._landing:
            asyncio.get_running_loop().call_soon(self._go_on_landing)
        self._landing.append(landing)

    def _go_on_landing(self) -> None:
        """Tells some callers, one of each flight after the other, and the next ones in the next pass of the loop."""
        for _ in range(_NUM_HEARD):
            if not self._landing:
                return
            landing = self._landing.popleft()
            if next(landing, self) is not self:
                self._landing.append(landing)
        if self._landing:
            asyncio.get_running_loop().call_soon(self._go_on_landing)


async def _flown(
    flight: Flight,
    work: Callable[Concatenate[Flight, ArgumentsT], Coroutine[Any, Any, ResultT]],
    *arguments: ArgumentsT.args,
    **keywords: ArgumentsT.kwargs,
) -> ResultT:
    """Runs the work. Raises the error of `Flight.drop` in place of the cancellation by it."""
    try:
        return await work(flight, *arguments, **keywords)
    except asyncio.CancelledError:
        if not flight.has_error:
            raise
    # Outside of the block, so that the error does not refer to the cancellation, and so to what the work held.
    raise flight.take_error()
