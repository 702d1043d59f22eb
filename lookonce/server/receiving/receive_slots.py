"""Slots for requests that may hold images: a call needs one while it receives a message. Event loop only, no locks.

gRPC does not tell the size of a message before all of it is there, so each slot stands for a message of the largest
size. Calls without a slot wait unread, and gRPC's flow control stops their clients. The next free slot goes to the
waiting caller that has the fewest.

A slot whose message has not arrived after some seconds is overdue. A caller has at most half of the slots besides its
overdue ones. If none is free, an overdue one is taken away for a call that waits. So slow uploads and streams that
pause go on while there are free slots, and silent callers cannot keep others out.

While more callers wait than there are slots, half of the slots are overdue much earlier. The reads that began first
keep the other half, because a slow upload cannot be told from a silent one: if all were cut short, none might end.
Callers whose read was taken away come later than others every second time, until one of their messages arrives. While
a caller without a slot waits that is not one of them, their slots in that half are overdue earlier, too.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lookonce.errors import DeadlineError, OverloadedError

MessageT = TypeVar("MessageT")


# Looks at all slots in the time in which one is sure.
_REVIEWS = 20
# Callers that are remembered because their reads were taken away.
_MAX_SLOW_CALLERS = 1024


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The number of slots, and how long a call may wait for one, hold it, and take to send its message."""

    # Two at least.
    num_slots: int
    # Time after which a slot is overdue, seconds.
    sure_s: float = 10.0
    # The same for half of the slots while more callers wait than there are slots. Messages of up to 4 MiB are there at
    # once, because gRPC receives as much while the call waits.
    crowded_sure_s: float = 1.0
    # Longest time in which a message must arrive, seconds: 32 MiB take two minutes at 2.5 Mbit/s.
    max_receive_s: float = 120.0
    # Longest time that a call waits for a slot, seconds.
    max_wait_s: float = 30.0
    # Calls that have waited for `settle_s` seconds. gRPC receives a part of the message of each (`server_options.py`).
    # More may wait for a shorter time: a thousand small requests at once are received well within it.
    max_waiting: int = 128
    settle_s: float = 2.0


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot, or a call that waits for one."""

    caller: str
    # Whether the stream may pause before its next message.
    may_pause: bool
    # Ends the wait: True when the call gets the slot, False when it is refused.
    turn: asyncio.Future[bool] | None = None
    # Start of the wait, if there is one, and of the read: times of the event loop.
    asked_s: float = math.inf
    begun_s: float = math.inf
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    # Whether the read is being ended, and whether that is for another call.
    is_ending: bool = False
    gives_way: bool = False

    def end_read(self, *, gives_way: bool) -> None:
        """Makes the read raise TimeoutError."""
        if not self.is_ending:
            self.is_ending, self.gives_way = True, gives_way
            self.limit.reschedule(0.0)


class ReceiveSlots:
    """The slots of one server address, and the calls that wait for them."""

    def __init__(self, limits: SlotLimits) -> None:
        self.limits = limits
        # The slots that each caller has, in the order in which it got them.
        self._taken: dict[str, dict[_Slot, None]] = {}
        self._num_taken = 0
        # The calls of each caller that wait, the oldest first. The caller that was served longest ago comes first.
        self._waiting: dict[str, dict[_Slot, None]] = {}
        self._num_waiting = 0
        # Callers whose last read was taken away, the last one at the end.
        self._slow: dict[str, None] = {}
        # Whether the next free slot goes to another caller than those, if one waits that has no slot.
        self._prefers_others = True
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_taken(self) -> int:
        """The number of slots that calls have."""
        return self._num_taken

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a slot."""
        return self._num_waiting

    async def receive(self, caller: str, read: Callable[[], Awaitable[MessageT]], *, may_pause: bool) -> MessageT:
        """Reads a message of `caller` when there is a slot for it.

        A stream that `may_pause` may take any time for its message, unless others wait for the slot. Raises
        OverloadedError if there is no slot for too long or too many calls wait, and if others need the slot while the
        message does not arrive; DeadlineError if the message takes too long.
        """
        slot, limits = _Slot(caller, may_pause), self.limits
        try:
            if self._num_taken < limits.num_slots and not self._waiting and self._has_share(caller):
                self._take(slot)
            else:
                await self._wait(slot)
            async with slot.limit:
                slot.begun_s = asyncio.get_running_loop().time()
                message = await read()
            self._slow.pop(caller, None)
            return message
        except TimeoutError:
            if not slot.is_ending:
                raise
            if slot.gives_way:
                self._remember_slow(caller)
                num_s = asyncio.get_running_loop().time() - slot.begun_s
                raise OverloadedError(
                    f"the request had not arrived after {num_s:.0f} s, and others wait; retry later"
                ) from None
            raise DeadlineError(f"the request had not arrived after {limits.max_receive_s:g} s") from None
        finally:
            self._give_back(slot)

    async def _wait(self, slot: _Slot) -> None:
        loop = asyncio.get_running_loop()
        slot.turn, slot.asked_s = loop.create_future(), loop.time()
        _add(self._waiting, slot)
        self._num_waiting += 1
        # There may be a free slot: its caller's slots, or those of an older call, have become overdue since the review.
        self._admit()
        self._take_away()
        try:
            async with asyncio.timeout(self.limits.max_wait_s) as patience:
                is_served = await slot.turn
        except TimeoutError:
            if not patience.expired():
                raise
            raise OverloadedError(
                f"the server had no memory to receive the request for {self.limits.max_wait_s:g} s; retry later"
            ) from None
        finally:
            self._end_wait(slot, None)
        if not is_served:
            raise OverloadedError(f"{self.limits.max_waiting} requests wait to be received; retry later")

    def _refuse_newest(self, now_s: float) -> None:
        """Refuses calls that have waited for long, if they are too many: the newest of the caller with the most.

        Of equal callers, those whose last read was taken away come first, and then the one with the newest call.
        """
        if self._num_waiting <= self.limits.max_waiting:
            return
        settled = [
            list(itertools.takewhile(lambda slot: slot.asked_s + self.limits.settle_s <= now_s, own))
            for own in self._waiting.values()
        ]

        def entry(index: int) -> tuple[int, bool, float, int]:
            newest = settled[index][-1]
            return -len(settled[index]), newest.caller not in self._slow, -newest.asked_s, -index

        most = [entry(index) for index, own in enumerate(settled) if own]
        heapq.heapify(most)
        for _ in range(sum(map(len, settled)) - self.limits.max_waiting):
            index = -most[0][-1]
            self._end_wait(settled[index].pop(), is_served=False)
            if settled[index]:
                heapq.heapreplace(most, entry(index))
            else:
                heapq.heappop(most)

    def _end_wait(self, slot: _Slot, is_served: bool | None) -> bool:
        """Takes a call out of the queue, with an answer if it still waits for one. Returns False if it does not."""
        if _remove(self._waiting, slot):
            self._num_waiting -= 1
        assert slot.turn is not None, "the call waits"
        # A cancelled call has yet to take itself out of the queue.
        if slot.turn.done() or is_served is None:
            return False
        slot.turn.set_result(is_served)
        return True

    def _has_share(self, caller: str) -> bool:
        """Whether the caller may take another slot."""
        own = self._taken.get(caller, ())
        return sum(not self._is_overdue(slot) for slot in own) < self.limits.num_slots // 2

    def _is_overdue(self, slot: _Slot) -> bool:
        return slot.begun_s + self.limits.sure_s <= asyncio.get_running_loop().time()

    def _take(self, slot: _Slot) -> None:
        _add(self._taken, slot)
        self._num_taken += 1
        if self._timer is None:
            self._set_timer()

    def _give_back(self, slot: _Slot) -> None:
        if _remove(self._taken, slot):
            self._num_taken -= 1
            if self._waiting:
                self._admit()
                self._take_away()

    def _admit(self) -> None:
        """Gives free slots to waiting calls."""
        while self._num_taken < self.limits.num_slots:
            caller = self._next_caller()
            if caller is None:
                return
            slot = next(iter(self._waiting[caller]))
            if self._end_wait(slot, is_served=True):
                self._take(slot)
                self._prefers_others = not self._prefers_others
            if caller in self._waiting:
                self._waiting[caller] = self._waiting.pop(caller)

    def _next_caller(self) -> str | None:
        """Returns the waiting caller that gets the next free slot, if one may have it.

        There may be thousands, so the search ends at the first one that has no slot.
        """
        if self._prefers_others and self._slow:
            for caller in self._waiting:
                if caller not in self._taken and caller not in self._slow:
                    return caller
        best, least = None, self.limits.num_slots
        for caller in self._waiting:
            num_taken = len(self._taken.get(caller, ()))
            if num_taken < least and self._has_share(caller):
                best, least = caller, num_taken
                if not least:
                    break
        return best

    def _take_away(self) -> None:
        """Ends overdue reads, as many as there are waiting callers that may have their slots."""
        num_ending = sum(slot.is_ending for slot in _all(self._taken))
        overdue = self._overdue_for_others()
        if not overdue:
            return
        entitled = (caller for caller in self._waiting if self._has_share(caller))
        num_wanted = sum(1 for _ in itertools.islice(entitled, self.limits.num_slots)) - num_ending
        num_reads = Counter(slot.caller for slot in _all(self._taken) if not slot.is_ending)
        for _ in range(min(num_wanted, len(overdue))):
            slot = max(overdue, key=lambda one: num_reads[one.caller])
            overdue.remove(slot)
            num_reads[slot.caller] -= 1
            slot.end_read(gives_way=True)

    def _overdue_for_others(self) -> list[_Slot]:
        """Returns the slots that others may get. Each caller's are in the order in which it got them."""
        now_s, limits = asyncio.get_running_loop().time(), self.limits
        slots = [slot for slot in _all(self._taken) if not slot.is_ending]
        sure: set[_Slot] = set(slots)
        is_crowded = len(self._waiting) > limits.num_slots
        if is_crowded or self._slow_callers_keep_others_out():
            sure = set(sorted(slots, key=lambda slot: slot.begun_s)[: limits.num_slots // 2])
            if not is_crowded:
                sure.update(slot for slot in slots if slot.caller not in self._slow)
        return [
            slot
            for slot in slots
            if slot.begun_s + (limits.sure_s if slot in sure else min(limits.sure_s, limits.crowded_sure_s)) <= now_s
        ]

    def _slow_callers_keep_others_out(self) -> bool:
        """Whether slow callers hold slots while another caller, none of whose reads was interrupted, waits for one."""
        if not self._slow:
            return False
        return any(caller not in self._slow and caller not in self._taken for caller in self._waiting)

    def _remember_slow(self, caller: str) -> None:
        self._slow.pop(caller, None)
        self._slow[caller] = None
        if len(self._slow) > _MAX_SLOW_CALLERS:
            del self._slow[next(iter(self._slow))]

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        # One turn later, because messages that arrived during a pause of the event loop go first.
        self._timer = loop.call_later(self.limits.sure_s / _REVIEWS, loop.call_soon, self._review)

    def _review(self) -> None:
        """Ends reads that are late, admits callers of overdue slots, and refuses calls if too many wait."""
        now_s = asyncio.get_running_loop().time()
        for slot in _all(self._taken):
            if not slot.may_pause and slot.begun_s + self.limits.max_receive_s <= now_s:
                slot.end_read(gives_way=False)
        self._admit()
        self._take_away()
        self._refuse_newest(now_s)
        self._timer = None
        if self._taken:
            self._set_timer()


def _all(slots: dict[str, dict[_Slot, None]]) -> list[_Slot]:
    return [slot for own in slots.values() for slot in own]


def _add(slots: dict[str, dict[_Slot, None]], slot: _Slot) -> None:
    slots.setdefault(slot.caller, {})[slot] = None


def _remove(slots: dict[str, dict[_Slot, None]], slot: _Slot) -> bool:
    """Removes a slot from those of its caller. Returns False if it is not there."""
    own = slots.get(slot.caller, {})
    if slot not in own:
        return False
    del own[slot]
    if not own:
        del slots[slot.caller]
    return True
