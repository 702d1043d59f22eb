"""The calls in flight. A drain waits for them, and ends those that take too long. Event loop only, no locks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lookonce.errors import UnavailableError

_DRAINING = "the server is shutting down; retry on another replica"


@dataclass(slots=True, eq=False)
class Call:
    """A call, which runs in its own task."""

    task: asyncio.Task[object]
    # False for health watches and reflection: they end only with their clients, so a drain does not wait for them.
    delays_drain: bool
    # Whether the drain, not the client, cancelled the task.
    expelled: bool = field(default=False)


class InflightCalls:
    """Admits calls until a drain begins, then waits for the admitted ones."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._refusing = False
        self._none_delays = asyncio.Event()
        self._none_delays.set()

    @property
    def num_delaying(self) -> int:
        """The number of calls that a drain would wait for."""
        return sum(call.delays_drain for call in self._calls)

    @contextmanager
    def admitted(self, *, delays_drain: bool) -> Iterator[Call]:
        """Counts the current task as a call. Raises UnavailableError once calls are refused."""
        if self._refusing:
            raise UnavailableError(_DRAINING)
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        call = Call(task, delays_drain)
        self._calls.add(call)
        if delays_drain:
            self._none_delays.clear()
        try:
            yield call
        except asyncio.CancelledError:
            if not call.expelled:
                raise
            task.uncancel()
            raise UnavailableError(_DRAINING) from None
        finally:
            self._calls.discard(call)
            if self.num_delaying == 0:
                self._none_delays.set()

    def refuse_new(self) -> None:
        """Refuses every new call with UnavailableError from now on."""
        self._refusing = True

    async def finished(self, timeout_s: float) -> bool:
        """Waits until no call delays the drain. Returns False when `timeout_s` seconds are over first."""
        try:
            await asyncio.wait_for(self._none_delays.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def expel_all(self) -> int:
        """Cancels the remaining calls, which end with UnavailableError. Returns how many of them delayed the drain."""
        for call in self._calls:
            call.expelled = True
            call.task.cancel()
        return self.num_delaying
