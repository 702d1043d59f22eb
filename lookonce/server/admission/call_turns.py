"""The order in which calls start when one connection sends many at once. Event loop only, no locks.

gRPC hands calls over one by one, in the order of their arrival. A connection may have 256 calls in progress, or more
(server_options.py), so a burst of them delays those of all other connections: to take a call from gRPC takes 0.1 ms, to
answer or refuse a short one 0.4 ms more. So the calls of a burst wait until gRPC has handed over all of them. Then they
start one after the other, one of each connection in turn. While other connections have calls in progress, a burst gets
a third of the event loop's time.

Beside 3000 calls on one connection, most of them beyond a quota, another client asked about a picture ten times a
second. With 1024 calls per connection, two starts at once, all of the time and Python's own interval between threads
(serving.py), its calls took 41 ms in the median, 123 ms (90 %) and 195 ms (99 %). Now they take 18, 33 and 85 ms; alone
8 ms (three interleaved runs, 2 x AMD EPYC, 2026-11-23).

A client may also drop its calls at once, by a reset or a short deadline. gRPC hands over such a call like any other and
tells of its end a few passes of the event loop later. So the calls of a connection that drops many wait for their turn,
too, and the dropped ones end there, before they cost more.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lookonce.errors import LookonceError

# A connection's calls wait if more than so many have come in so many seconds, and the last ones are still in progress.
# One that sends a call after the other, or some at a time, does not reach this.
_NUM_FREE = 16
_INTERVAL_S = 0.01
_NUM_UNFINISHED = 2
# The calls of a connection also wait if more than `_NUM_FREE` of them were dropped in this interval, seconds.
_DROP_INTERVAL_S = 1.0
# A burst is over when no call has come for so long, seconds.
_QUIET_S = 0.001
# Longest wait for that, seconds; then some calls start all the same.
_MAX_BURST_S = 0.1
_NUM_STARTED = 32
# After the start of a call of a burst, calls of other connections get the event loop for so many times as long.
_PAUSE_PER_START = 2.0


class CallTurns:
    """The calls that wait for their start. One object for a process, since all its servers share the event loop."""

    def __init__(self) -> None:
        # Calls that have started and not ended, by caller.
        self._num_in_progress: Counter[str] = Counter()
        # The same without calls that last as long as their client, such as a watch of the health.
        self._num_working: Counter[str] = Counter()
        # Waiting calls by caller. The next one is the first of the first caller.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._num_arrived = 0
        # Calls of this interval, by caller.
        self._num_recent: Counter[str] = Counter()
        self._interval_ends_s = 0.0
        # Calls that were dropped in this interval, by caller.
        self._num_dropped: Counter[str] = Counter()
        self._drop_interval_ends_s = 0.0
        self._starter: asyncio.Task[None] | None = None
        self._has_ended = False

    async def may_start(self, caller: str) -> bool:
        """Waits until a new call of `caller`, a connection, may start. Returns whether it had to wait."""
        has_to_wait = self._is_of_burst(caller)
        if has_to_wait:
            await self._turn(caller)
        return has_to_wait

    def dropped(self, caller: str) -> None:
        """Counts a call that its client has cancelled or whose deadline has passed."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._drop_interval_ends_s:
            self._drop_interval_ends_s = now_s + _DROP_INTERVAL_S
            self._num_dropped.clear()
        self._num_dropped[caller] += 1

    @asynccontextmanager
    async def in_progress(self, caller: str, *, has_waited: bool, is_working: bool = True) -> AsyncIterator[None]:
        """Counts a call in the block, which is the call. `has_waited` is the answer of `may_start`.

        Calls that only watch (`is_working` False) slow down no burst of others.
        """
        counts = (self._num_in_progress, self._num_working) if is_working else (self._num_in_progress,)
        for count in counts:
            count[caller] += 1
        try:
            yield
        except LookonceError:
            # A call that is refused at once has ended before gRPC hands over the next one. It waits here, or else a
            # burst of such calls would not look like one.
            if not has_waited and not self._has_ended and self._num_recent[caller] > _NUM_FREE:
                await self._turn(caller)
            raise
        finally:
            for count in counts:
                count[caller] -= 1
                if not count[caller]:
                    del count[caller]

    def end(self) -> None:
        """Starts all calls that wait, and later ones at once: a drain refuses them."""
        self._has_ended = True
        while self._waiting:
            self._start_next()

    def _is_of_burst(self, caller: str) -> bool:
        if self._has_ended:
            return False
        self._num_arrived += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._interval_ends_s:
            self._interval_ends_s = now_s + _INTERVAL_S
            self._num_recent.clear()
        self._num_recent[caller] += 1
        if caller in self._waiting or (now_s < self._drop_interval_ends_s and self._num_dropped[caller] > _NUM_FREE):
            return True
        return self._num_recent[caller] > _NUM_FREE and self._num_in_progress[caller] >= _NUM_UNFINISHED

    async def _turn(self, caller: str) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        if self._starter is None:
            # Without the context of the call that happens to be the first.
            self._starter = loop.create_task(self._start_all(), context=contextvars.Context())
        await turn

    async def _start_all(self) -> None:
        try:
            while self._waiting:
                await self._burst_is_over()
                for _ in range(_NUM_STARTED):
                    if not self._waiting:
                        break
                    await self._start_one()
        finally:
            self._starter = None

    async def _burst_is_over(self) -> None:
        """Waits until gRPC hands over no more calls, or for the longest time."""
        clock = asyncio.get_running_loop().time
        until_s, num_before = clock() + _MAX_BURST_S, -1
        while num_before != self._num_arrived and clock() < until_s:
            num_before = self._num_arrived
            await asyncio.sleep(_QUIET_S)

    async def _start_one(self) -> None:
        """Starts a call, lets it run until it waits for something, and then leaves the event loop to other callers."""
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        self._start_next()
        await asyncio.sleep(0)
        if any(caller not in self._waiting for caller in self._num_working):
            await asyncio.sleep(_PAUSE_PER_START * (clock() - begun_s))

    def _start_next(self) -> None:
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            # Calls that were cancelled while they waited are done.
            while turns and turns[0].done():
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[caller] = turns
                return
