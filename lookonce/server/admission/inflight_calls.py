"""The calls in flight. A drain waits for them, and ends those that take too long. Event loop only, no locks.

Calls that arrive during a drain are refused. When its server is told to stop, gRPC cancels each call that it has
received but not yet handed over, without a reason. Refusals are therefore held back until gRPC has handed over all
calls; their callers cannot send new ones meanwhile. Before, 64 busy callers got 62 CANCELLED per drain; now none
(2026-11-23).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from lookonce.errors import UnavailableError
from lookonce.server.admission.send_queues import LOOK_S, SendQueues

MessageT = TypeVar("MessageT")

_DRAINING = "the server is shutting down; retry on another replica"
# All calls have been handed over when none came during so many looks, each after a wait of so many seconds. gRPC hands
# over one call in some passes of the event loop, which can take long: one wait of 50 ms was not enough beside a burst,
# of which up to 955 of 1000 calls then got CANCELLED. On a machine that is short of processors, clients and gRPC's
# threads may pause for longer: after 10 looks, up to 552 of 1800 calls got CANCELLED (2026-11-24).
_NUM_QUIET_LOOKS = 60
# The same while no call is in progress and none has come: a service that nobody uses ends sooner.
_NUM_IDLE_LOOKS = 10
_LOOK_S = 0.005
# New callers may delay the end for so many seconds, or for a part of the drain's time limit; what goes beyond these
# seconds is taken from that limit. Beside five busy processes it took 3.8 s to hand over 1000 calls.
_SETTLE_S = 3.0
_SETTLE_PART = 1 / 3
# The longest such delay: refused callers wait for it. Clients that send 20 short calls per second, also while earlier
# ones have no answer, delayed refusals by up to 10 s of a drain with a time limit of 30 s, and 13 s of one with 60 s
# (2026-11-25). Without this bound, it would be 40 s of two minutes.
_MAX_SETTLE_S = 10.0
# A drain does not wait any longer for a call whose client has not moved it on for so many seconds: the client's host
# takes nothing of the answer, see send_queues.py, or the client sends no message of the request. gRPC tells only when a
# whole message is received, so it is the time for a message on a slow link: 1 MiB over 1.7 Mbit/s, and 32 MiB, the
# largest by default, over 54 Mbit/s.
STALL_S = 5.0
# Time between two looks for stalled calls during a drain.
_STALL_LOOK_S = 0.25
# The statuses of expelled calls are sent within so many looks, each after a wait of so many seconds. A busy event loop
# makes each look longer. Clients cannot do so.
_NUM_SENT_LOOKS = 20
_SENT_LOOK_S = 0.05


@dataclass(slots=True, eq=False)
class Call:
    """A call, which runs in its own task."""

    task: asyncio.Task[object]
    # The client, as gRPC names it.
    peer: str
    # False for health watches and reflection: they end only with their clients, so a drain does not wait for them.
    delays_drain: bool
    # Whether the drain, not the client, cancelled the task.
    expelled: bool = field(default=False)
    # Times at which the call began to wait for its client, on the event loop's clock; None while it does not: for a
    # message of the request, for room to write one of the answer, and for gRPC to send the end of the answer.
    _receiving_since_s: float | None = field(default=None)
    _writing_since_s: float | None = field(default=None)
    _ending_since_s: float | None = field(default=None)
    # Messages of the request that have no message of the answer yet. A stream has one answer for each, and its next
    # message is awaited while the service works on those before.
    _num_owed: int = field(default=0)

    async def received(self, receive: Awaitable[MessageT]) -> MessageT:
        """Waits for a message of the request, or for its end."""
        self._receiving_since_s = asyncio.get_running_loop().time()
        try:
            message = await receive
        finally:
            self._receiving_since_s = None
        self._num_owed += 1
        return message

    async def written(self, write: Awaitable[None]) -> None:
        """Waits for the write of a message of the answer."""
        loop = asyncio.get_running_loop()
        self._writing_since_s = loop.time()
        await write
        self._writing_since_s = None
        self._num_owed -= 1
        if self._receiving_since_s is not None:
            self._receiving_since_s = loop.time()

    def note_end(self) -> None:
        """Notes that gRPC sends the end of the answer from now on."""
        self._ending_since_s = asyncio.get_running_loop().time()

    def waits_since(self) -> float:
        """Returns the time since which the call waits for its client only, infinity if the service works on it."""
        if self._ending_since_s is not None:
            return self._ending_since_s
        if self._writing_since_s is not None:
            return self._writing_since_s
        if self._receiving_since_s is not None and self._num_owed <= 0:
            return self._receiving_since_s
        return math.inf


class InflightCalls:
    """Admits calls until a drain begins, then waits for the admitted ones."""

    def __init__(self) -> None:
        # Those of the connections on which the calls come.
        self.queues = SendQueues()
        # By their task.
        self._calls: dict[asyncio.Task[object], Call] = {}
        # A sum over all calls at the end of each would let health watches, which need no token, slow down the others.
        self._num_delaying = 0
        self._draining = self._refusing = False
        self._num_refused = 0
        # Set when refused calls get their answers.
        self._refusals_go_out = asyncio.Event()
        # Calls whose task, which also sends their answer, has not ended; without those that do not delay a drain.
        self._unanswered: dict[asyncio.Task[object], Call] = {}
        self._none_unanswered = asyncio.Event()
        self._none_unanswered.set()

    @property
    def num_delaying(self) -> int:
        """The number of calls that a drain would wait for."""
        return self._num_delaying

    @asynccontextmanager
    async def admitted(self, *, delays_drain: bool, peer: str = "") -> AsyncIterator[Call]:
        """Counts the current task as a call of `peer`. Raises UnavailableError once calls are refused."""
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        call = Call(task, peer, delays_drain)
        if delays_drain:
            self._unanswered[task] = call
            self._none_unanswered.clear()
            task.add_done_callback(self._note_answer)
        if self._refusing:
            self._num_refused += 1
            await self._refusals_go_out.wait()
            call.note_end()
            raise UnavailableError(_DRAINING)
        self._calls[task] = call
        self._num_delaying += delays_drain
        try:
            yield call
        except asyncio.CancelledError:
            if not call.expelled:
                raise
            task.uncancel()
            raise UnavailableError(_DRAINING) from None
        finally:
            call.note_end()
            del self._calls[task]
            self._num_delaying -= delays_drain

    @property
    def is_draining(self) -> bool:
        """Whether a drain has begun. New calls are admitted until `refuse_new`."""
        return self._draining

    def begin_drain(self) -> None:
        """Notes that connections will be closed soon."""
        self._draining = True

    async def received_by_client(self) -> None:
        """In a drain, waits until the host of the current call's client has received all of the answer.

        Use it before gRPC sends the end of the answer, with which it may close the connection.
        """
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        if self._refusing and (call := self._unanswered.get(task)) is not None:
            await self.queues.emptied(call.peer)

    def current(self) -> Call:
        """Returns the call that the current task has been admitted as."""
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        return self._calls[task]

    async def refuse_new(self, timeout_s: float) -> float:
        """Refuses every new call from now on. Waits until gRPC has handed over those that it had received.

        The refused calls get their answers after `answer_refused`: tell the server to stop before that. Returns what is
        left of `timeout_s`, the time limit for calls in flight.
        """
        self._refusing = True
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        until_s = begun_s + max(_SETTLE_S, min(timeout_s * _SETTLE_PART, _MAX_SETTLE_S))
        num_quiet_looks = 0
        while num_quiet_looks < self._num_looks() and loop.time() < until_s:
            num_before = self._num_refused
            await asyncio.sleep(_LOOK_S)
            num_quiet_looks = num_quiet_looks + 1 if num_before == self._num_refused else 0
        return timeout_s - max(0.0, loop.time() - begun_s - _SETTLE_S)

    def _num_looks(self) -> int:
        return _NUM_QUIET_LOOKS if self.num_delaying or self._num_refused else _NUM_IDLE_LOOKS

    def answer_refused(self) -> None:
        """Lets refused calls end with UnavailableError, those of the past and those to come."""
        self._refusals_go_out.set()

    async def finished(self, timeout_s: float) -> bool:
        """Waits until clients' hosts have received the answers of all calls that delay the drain, refused ones too.

        Does not wait for calls whose clients have not moved them on for long; that time begins now at the earliest.
        Returns False when calls or bytes are left: of such clients, or because `timeout_s` seconds are over.
        """
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while loop.time() < begun_s + timeout_s:
            await self.queues.look()
            if self._none_unanswered.is_set():
                return await self._received(begun_s, begun_s + timeout_s)
            if not self._is_awaited(begun_s):
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_STALL_LOOK_S, begun_s + timeout_s - loop.time())):
                    await self._none_unanswered.wait()
        return self._none_unanswered.is_set()

    def _is_awaited(self, begun_s: float) -> bool:
        """Whether there is a call that does not wait for its client, or has not for long since `begun_s`."""
        stalled_since_s = asyncio.get_running_loop().time() - STALL_S
        return any(
            max(call.waits_since(), begun_s, self.queues.moved_s(call.peer)) > stalled_since_s
            for call in self._unanswered.values()
        )

    async def _received(self, begun_s: float, until_s: float) -> bool:
        """Waits until clients' hosts have all bytes; not for those that have taken none for long since `begun_s`."""
        loop = asyncio.get_running_loop()
        while await self.queues.look():
            if loop.time() >= min(until_s, max(self.queues.last_moved_s, begun_s) + STALL_S):
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def statuses_sent(self) -> None:
        """Waits until gRPC has sent the statuses of expelled calls, for about a second at most."""
        for _ in range(_NUM_SENT_LOOKS):
            if self._none_unanswered.is_set():
                return
            await asyncio.sleep(_SENT_LOOK_S)

    def _note_answer(self, task: asyncio.Task[object]) -> None:
        del self._unanswered[task]
        if not self._unanswered:
            self._none_unanswered.set()

    def expel_all(self) -> int:
        """Cancels the remaining calls, which end with UnavailableError. Returns how many of them delayed the drain."""
        for call in self._calls.values():
            call.expelled = True
            call.task.cancel()
        return self.num_delaying
