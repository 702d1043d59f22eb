"""The messages of one call, received when the call has been admitted, within the memory for such messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc.aio

from lookonce.errors import InvalidInputError
from lookonce.server.receive_budget import ReceiveBudget, Reservation

# A call that was cancelled also looks as if its client had finished sending. Its cancellation follows within this time.
_CANCELLATION_S = 0.2


class Inbox:
    """The messages that a caller sends, parsed: one of a unary request, or a stream of them."""

    def __init__(self, context: Any, budget: ReceiveBudget, parse: Callable[[bytes], Any]) -> None:
        """`context` is the context of a call whose handler is, to gRPC, one with a stream of requests."""
        self._context = context
        self._budget = budget
        self._parse = parse
        self._connection: str = context.peer()
        self._reservation: Reservation | None = None
        self._has_begun = False

    async def only_message(self) -> Any:
        """Receives a unary request.

        Raises InvalidInputError if there is none, DeadlineError if it takes too long, and OverloadedError if there is
        no memory for it. Further messages are not read, as gRPC does it in Python: to look for them takes 7 % of the
        time of a short call.
        """
        message = await self._next(may_pause=False)
        if message is grpc.aio.EOF:
            await asyncio.sleep(_CANCELLATION_S)
            raise InvalidInputError("the call has no request message; send one")
        return self._parse(message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Receives the next message of a stream. The memory of the one before it is given back."""
        self.release()
        # A stream may pause, but not begin late.
        message = await self._next(may_pause=self._has_begun)
        self._has_begun = True
        if message is grpc.aio.EOF:
            self.release()
            raise StopAsyncIteration
        return self._parse(message)

    def release(self) -> None:
        """Gives back the memory for messages."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()

    async def _next(self, *, may_pause: bool) -> Any:
        budget = self._budget
        reservation = budget.reserve_now(self._connection) or await budget.reserve(self._connection)
        self._reservation = reservation
        message = await reservation.receive(self._context.read(), may_pause=may_pause)
        if message is not grpc.aio.EOF:
            reservation.received(len(message))
        return message
