"""Bounds the reads of short requests that have begun and got no message. Event loop only, no locks.

Short requests are those of health and of methods without images. An honest one arrives together with its call's
headers, so every read begins at once. When too many reads are unfinished after a moment, the caller with the most of
those loses its oldest one. Callers that send nothing therefore take the place of each other, never that of honest
calls.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lookonce.errors import DeadlineError, OverloadedError

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """The limits of one kind of short requests."""

    # Unfinished reads that have lasted for `sure_s`, of all callers and of one.
    max_reads: int
    max_reads_of_caller: int
    # A read does not count before this time, seconds. gRPC hands over even a message that is already there
    # only after some turns of the event loop.
    sure_s: float
    # Time in which a message must arrive, seconds.
    max_receive_s: float


@dataclass(slots=True, eq=False)
class _Read:
    """One read that has not got its message."""

    begun_s: float
    late_at_s: float
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    gives_way: bool = False


class UnfinishedReads:
    """The unfinished reads of one server address."""

    def __init__(self, limits: ReadLimits) -> None:
        self.limits = limits
        # The reads of each caller, the oldest first.
        self._reads: dict[str, dict[_Read, None]] = {}
        self._num_reads = 0
        # Looks at all reads every `sure_s`: a timer for each read cost short calls 4 % of their time.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_reads(self) -> int:
        """The number of unfinished reads."""
        return self._num_reads

    async def receive(self, caller: str, read: Callable[[], Awaitable[MessageT]], *, may_pause: bool) -> MessageT:
        """Reads a message of `caller`, at once.

        Raises OverloadedError if too many reads are unfinished and this one has to go, and DeadlineError if the message
        takes too long. A stream that `may_pause` may take any time.
        """
        limits, loop = self.limits, asyncio.get_running_loop()
        now_s = loop.time()
        one = _Read(now_s, math.inf if may_pause else now_s + limits.max_receive_s)
        try:
            async with one.limit:
                self._reads.setdefault(caller, {})[one] = None
                self._num_reads += 1
                if self._timer is None:
                    self._set_timer(loop)
                return await read()
        except TimeoutError:
            if not one.limit.expired():
                raise
            if one.gives_way:
                raise OverloadedError("the request did not come with its call, and others do; retry later") from None
            raise DeadlineError(f"the request had not arrived after {limits.max_receive_s:g} s") from None
        finally:
            self._remove(caller, one)

    def _remove(self, caller: str, one: _Read) -> None:
        own = self._reads.get(caller, {})
        if one in own:
            del own[one]
            self._num_reads -= 1
            if not own:
                del self._reads[caller]

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        # One turn later, because messages that arrived during a pause of the event loop go first.
        self._timer = loop.call_later(self.limits.sure_s, loop.call_soon, self._review)

    def _review(self) -> None:
        """Ends the reads that are late, and those that have to go."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        late = [(caller, one) for caller, own in self._reads.items() for one in own if one.late_at_s <= now_s]
        for caller, one in late:
            self._stop(caller, one)
        self._end_excess(now_s)
        self._timer = None
        if self._reads:
            self._set_timer(loop)

    def _end_excess(self, now_s: float) -> None:
        """Ends the oldest reads of the callers with the most until there are not too many. Fresh reads do not count."""
        limits, num = self.limits, 0
        # For each caller the reads that count, the oldest first, and a heap of their numbers: one pass over all reads.
        counted: list[tuple[str, deque[_Read]]] = []
        for caller, own in self._reads.items():
            old = deque(itertools.takewhile(lambda one: one.begun_s + limits.sure_s <= now_s, own))
            if old:
                counted.append((caller, old))
                num += len(old)
        most = [(-len(old), index) for index, (_, old) in enumerate(counted)]
        heapq.heapify(most)
        while most and (num > limits.max_reads or -most[0][0] > limits.max_reads_of_caller):
            negative_len, index = most[0]
            caller, old = counted[index]
            one = old.popleft()
            one.gives_way = True
            self._stop(caller, one)
            num -= 1
            heapq.heapreplace(most, (negative_len + 1, index))

    def _stop(self, caller: str, one: _Read) -> None:
        self._remove(caller, one)
        one.limit.reschedule(0.0)
