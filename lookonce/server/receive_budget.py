"""Memory for the messages that callers send: bounded in all and per connection. Event loop only, no locks.

gRPC does not tell the size of a message before all of it is there. So a call reserves the size of the largest message
before it reads one, and gives back the rest when it knows the size. Calls without a reservation wait in order. Their
callers wait too, because gRPC's flow control stops them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from lookonce.errors import DeadlineError, OverloadedError

MessageT = TypeVar("MessageT")

# Requests without images that are received at the same time: of callers with a token, and of health. Each may turn out
# to be a large message, but an honest one is there within one round trip.
_NUM_SHORT = 8
_NUM_UNAUTHENTICATED = 4
# Calls that wait for a reservation. gRPC receives up to 2 MiB of each unread (`server_options.py`).
_MAX_WAITING = 256


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """The limits of one budget."""

    # All reservations together. Those of one connection take at most half.
    max_bytes: int
    # The largest message that gRPC accepts.
    max_message_bytes: int
    # Time in which a message must arrive, seconds.
    max_receive_s: float
    # Time after which a message that has not arrived gives way to waiting calls, seconds. So callers that send nothing
    # cannot keep others out.
    sure_s: float
    # Longest time that a call waits for its reservation, seconds.
    max_wait_s: float
    # Further calls are refused at once. Each waiting call holds what gRPC receives of a message unread.
    max_waiting: int
    # Whether a message counts until its call ends, or only until it has been received.
    counts_received: bool


def _for_images(max_bytes: int, max_message_bytes: int) -> ReceiveLimits:
    # 64 MiB take two minutes at 5 Mbit/s.
    return ReceiveLimits(
        max_bytes=max(max_bytes, 2 * max_message_bytes),
        max_message_bytes=max_message_bytes,
        max_receive_s=120.0,
        sure_s=10.0,
        max_wait_s=30.0,
        max_waiting=_MAX_WAITING,
        counts_received=True,
    )


def _for_short(max_messages: int, max_message_bytes: int) -> ReceiveLimits:
    return ReceiveLimits(
        max_bytes=max_messages * max_message_bytes,
        max_message_bytes=max_message_bytes,
        max_receive_s=10.0,
        sure_s=0.2,
        max_wait_s=10.0,
        max_waiting=_MAX_WAITING,
        counts_received=False,
    )


class ReceiveBudgets:
    """The budgets of one server address. Uploads of images keep out no short request, and neither keeps out health."""

    def __init__(self, max_bytes: int, max_message_bytes: int, open_services: frozenset[str]) -> None:
        """`max_bytes` is for requests with images. `open_services` (health) need no token."""
        self._open_services = open_services
        self._images = ReceiveBudget(_for_images(max_bytes, max_message_bytes))
        self._short = ReceiveBudget(_for_short(_NUM_SHORT, max_message_bytes))
        self._unauthenticated = ReceiveBudget(_for_short(_NUM_UNAUTHENTICATED, max_message_bytes))

    def of(self, method: str, *, has_images: bool) -> ReceiveBudget:
        """Returns the budget for the requests of `method` ("/package.Service/Method")."""
        if method.strip("/").partition("/")[0] in self._open_services:
            return self._unauthenticated
        return self._images if has_images else self._short


class ReceiveBudget:
    """Reservations of calls for their messages."""

    def __init__(self, limits: ReceiveLimits) -> None:
        self.limits = limits
        self._num_bytes = 0
        self._bytes_by_connection: dict[str, int] = {}
        # Calls without a reservation, the oldest first, with their connections.
        self._waiting: dict[asyncio.Future[Reservation], str] = {}
        # Reservations whose message is on its way, the oldest first.
        self._receiving: dict[Reservation, None] = {}
        # One timer for all messages: a timer for each cost short calls 4 % of their time.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        """The memory that is reserved now."""
        return self._num_bytes

    @property
    def num_waiting(self) -> int:
        """The number of calls without a reservation."""
        return len(self._waiting)

    def reserve_now(self, connection: str) -> Reservation | None:
        """Reserves the memory of one message for a call of `connection`. Returns None if the call must wait for it."""
        if self._has_share(connection) and self._has_room():
            return Reservation(self, connection)
        return None

    async def reserve(self, connection: str) -> Reservation:
        """Waits for the memory of one message, and reserves it.

        Raises OverloadedError if too many calls wait, or if the wait takes too long.
        """
        if len(self._waiting) >= self.limits.max_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests are waiting to be received; retry later")
        turn: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = connection
        self._set_timer()
        try:
            async with asyncio.timeout(self.limits.max_wait_s):
                return await asyncio.shield(turn)
        except BaseException as error:
            if turn.done():
                turn.result().release()
            self._waiting.pop(turn, None)
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"for {self.limits.max_wait_s:g} s there was no memory to receive the request; retry later"
                ) from None
            raise

    def change(self, connection: str, num_bytes: int) -> None:
        """Adds to what the connection has reserved, or gives back if negative. For reservations only."""
        self._num_bytes += num_bytes
        of_connection = self._bytes_by_connection.get(connection, 0) + num_bytes
        if of_connection:
            self._bytes_by_connection[connection] = of_connection
        else:
            del self._bytes_by_connection[connection]
        if num_bytes < 0 and self._waiting:
            self._admit_waiting()

    def begin(self, reservation: Reservation) -> None:
        """Notes that a message is on its way. For reservations only."""
        self._receiving[reservation] = None
        if self._timer is None or self._waiting:
            self._set_timer()

    def end(self, reservation: Reservation) -> None:
        """Notes that a message has arrived, or never will. For reservations only."""
        self._receiving.pop(reservation, None)

    def _has_room(self) -> bool:
        return self._num_bytes + self.limits.max_message_bytes <= self.limits.max_bytes

    def _has_share(self, connection: str) -> bool:
        reserved = self._bytes_by_connection.get(connection, 0)
        return reserved + self.limits.max_message_bytes <= self.limits.max_bytes // 2

    def _admit_waiting(self) -> None:
        for turn, connection in list(self._waiting.items()):
            if not self._has_room():
                break
            if self._has_share(connection):
                del self._waiting[turn]
                turn.set_result(Reservation(self, connection))
        self._set_timer()

    def _set_timer(self) -> None:
        """Sets the timer to the first time at which `_end_late` may have something to do."""
        if self._timer is not None:
            self._timer.cancel()
        times_s = [one.late_at_s for one in self._receiving]
        if (silent := self._longest_awaited()) is not None:
            times_s.append(silent.sure_until_s)
        at_s, loop = min(times_s, default=math.inf), asyncio.get_running_loop()
        # One turn later, because messages that arrived during a pause of the event loop go first.
        self._timer = None if at_s == math.inf else loop.call_at(at_s, loop.call_soon, self._end_late)

    def _end_late(self) -> None:
        """Ends messages that took too long, and the one that gives way to the call which has waited longest."""
        now_s = asyncio.get_running_loop().time()
        late = [one for one in self._receiving if one.late_at_s <= now_s]
        silent = self._longest_awaited()
        if silent is not None and silent.sure_until_s <= now_s and silent not in late:
            silent.gives_way = True
            late.append(silent)
        for one in late:
            del self._receiving[one]
            one.stop()
        self._set_timer()

    def _longest_awaited(self) -> Reservation | None:
        """Returns the oldest reservation without its message that keeps the first waiting call out, if there is one."""
        connection = next(iter(self._waiting.values()), None)
        if connection is None:
            return None
        has_share = self._has_share(connection)
        return next((one for one in self._receiving if has_share or one.connection == connection), None)


class Reservation:
    """The memory that one call has reserved for a message."""

    __slots__ = ("_budget", "_limit", "_num_bytes", "connection", "gives_way", "late_at_s", "sure_until_s")

    def __init__(self, budget: ReceiveBudget, connection: str) -> None:
        self._budget = budget
        self.connection = connection
        self._num_bytes = budget.limits.max_message_bytes
        self._limit: asyncio.Timeout | None = None
        # Times of the event loop, set by `receive`: the message must be there, and other calls can take the memory.
        self.late_at_s = self.sure_until_s = math.inf
        # Whether another call gets this memory because the message has not arrived.
        self.gives_way = False
        budget.change(connection, self._num_bytes)

    async def receive(self, message: Awaitable[MessageT], *, may_pause: bool) -> MessageT:
        """Waits for the message.

        Raises DeadlineError if it takes too long, unless the caller may pause, and OverloadedError if it takes long and
        other calls need the memory.
        """
        limits = self._budget.limits
        now_s = asyncio.get_running_loop().time()
        self.sure_until_s = now_s + limits.sure_s
        self.late_at_s = math.inf if may_pause else now_s + limits.max_receive_s
        try:
            async with asyncio.timeout(None) as self._limit:
                self._budget.begin(self)
                return await message
        except TimeoutError:
            if self.gives_way:
                raise OverloadedError(
                    f"the request had not arrived after {limits.sure_s:g} s, and other callers wait; retry later"
                ) from None
            raise DeadlineError(f"the request had not arrived after {limits.max_receive_s:g} s") from None
        finally:
            self._budget.end(self)
            self._limit = None

    def stop(self) -> None:
        """Ends `receive` with an error."""
        assert self._limit is not None, "the message is being received"
        self._limit.reschedule(0.0)

    def received(self, num_bytes: int) -> None:
        """Gives back what the message did not need."""
        self._keep(num_bytes if self._budget.limits.counts_received else 0)

    def release(self) -> None:
        """Gives all of the memory back. A second call does nothing."""
        self._keep(0)

    def _keep(self, num_bytes: int) -> None:
        given_back, self._num_bytes = self._num_bytes - num_bytes, num_bytes
        if given_back:
            self._budget.change(self.connection, -given_back)
