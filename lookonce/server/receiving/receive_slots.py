"""Slots for requests that may hold images: a call needs one while it receives a message. Event loop only, no locks.

gRPC does not tell the size of a message before all of it is there, so each slot stands for a message of the largest
size. Calls without a slot wait unread, and gRPC's flow control stops their clients. The next free slot goes to the
waiting caller that has the fewest.

A slot whose message has not arrived after some seconds is overdue. A caller has at most half of the slots besides its
overdue ones. If none is free, an overdue one is taken away for a call that waits. So slow uploads and streams that
pause go on while there are free slots, and silent callers cannot keep others out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lookonce.errors import DeadlineError, OverloadedError

MessageT = TypeVar("MessageT")


# Looks at all slots in the time in which one is sure.
_REVIEWS = 20


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The number of slots and the times of their use."""

    # Two at least.
    num_slots: int
    # Time after which a slot is overdue, seconds.
    sure_s: float = 10.0
    # Longest time in which a message must arrive, seconds: 64 MiB take two minutes at 5 Mbit/s.
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
            if self._num_taken < limits.num_slots and self._has_share(caller):
                self._take(slot)
            else:
                await self._wait(slot)
            async with slot.limit:
                slot.begun_s = asyncio.get_running_loop().time()
                return await read()
        except TimeoutError:
            if not slot.is_ending:
                raise
            if slot.gives_way:
                raise OverloadedError(
                    f"the request had not arrived after {limits.sure_s:g} s, and others wait; retry later"
                ) from None
            raise DeadlineError(f"the request had not arrived after {limits.max_receive_s:g} s") from None
        finally:
            self._give_back(slot)

    async def _wait(self, slot: _Slot) -> None:
        loop = asyncio.get_running_loop()
        slot.turn, slot.asked_s = loop.create_future(), loop.time()
        _add(self._waiting, slot)
        self._num_waiting += 1
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

    def _refuse_newest(self) -> None:
        """Refuses the newest call of the caller with the most waiting calls."""
        caller = max(self._waiting, key=lambda one: len(self._waiting[one]))
        self._end_wait(next(reversed(self._waiting[caller])), is_served=False)

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
            callers = [caller for caller in self._waiting if self._has_share(caller)]
            if not callers:
                return
            caller = min(callers, key=lambda one: len(self._taken.get(one, ())))
            slot = next(iter(self._waiting[caller]))
            if self._end_wait(slot, is_served=True):
                self._take(slot)
            if caller in self._waiting:
                self._waiting[caller] = self._waiting.pop(caller)

    def _take_away(self) -> None:
        """Ends an overdue read for a call that waits. The next one follows when its slot has been given back."""
        slots = _all(self._taken)
        overdue = [slot for slot in slots if self._is_overdue(slot)]
        if not overdue or any(slot.is_ending for slot in slots):
            return
        if any(self._has_share(caller) for caller in self._waiting):
            max(overdue, key=lambda slot: len(self._taken[slot.caller])).end_read(gives_way=True)

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
        num_settled = sum(slot.asked_s + self.limits.settle_s <= now_s for slot in _all(self._waiting))
        for _ in range(num_settled - self.limits.max_waiting):
            self._refuse_newest()
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
