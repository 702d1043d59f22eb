"""The messages of one call, received when the call has been admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, Self, TypeVar

import grpc.aio

from lookonce.errors import InvalidInputError
from lookonce.identity import current_identity
from lookonce.server.admission.inflight_calls import Call
from lookonce.server.receiving.receive_slots import ReceiveSlots, SlotLimits
from lookonce.server.receiving.unfinished_reads import ReadLimits, UnfinishedReads

# A call that was cancelled also looks as if its client had finished sending. Its cancellation follows within this time.
_CANCELLATION_S = 0.2
# Requests without a token: health. An honest one comes in the same packet as its headers.
_OPEN_READS = ReadLimits(max_reads=8, max_reads_of_caller=2, sure_s=0.2, max_receive_s=10.0)
# Requests without images of callers with a token. A megabyte may take some round trips.
_SHORT_READS = ReadLimits(max_reads=16, max_reads_of_caller=8, sure_s=1.0, max_receive_s=10.0)
# One slot for each of two callers.
_MIN_SLOTS = 2
# gRPC copies a message twice under Python's lock, protobuf once more, and its reader the image. Between them other
# calls run if the message has more than this size: for as long as several short calls take, because each needs the
# event loop several times. In new memory, 32 MiB took 39 and then 18 ms, and a call that came before them waited for
# both when they followed each other (2 x AMD EPYC, 2026-11-25).
_LARGE_BYTES = 4 << 20
_PAUSE_S = 0.002

MessageT = TypeVar("MessageT")


class Receiver(Protocol):
    """Decides when calls read their messages, and for how long."""

    async def receive(self, caller: str, read: Callable[[], Awaitable[MessageT]], *, may_pause: bool) -> MessageT:
        """Returns the message of `read`. Raises OverloadedError or DeadlineError."""
        ...


class Receivers:
    """The receivers of one server address. Uploads keep out no short request, and neither keeps out health."""

    def __init__(self, max_receive_bytes: int, max_message_bytes: int, open_services: frozenset[str]) -> None:
        """`max_receive_bytes` is for requests with images. `open_services` (health) need no token."""
        self._open_services = open_services
        self._open_reads = UnfinishedReads(_OPEN_READS)
        self._short_reads = UnfinishedReads(_SHORT_READS)
        self._slots = ReceiveSlots(SlotLimits(max(max_receive_bytes // max_message_bytes, _MIN_SLOTS)))

    def of(self, method: str, *, has_images: bool) -> Receiver:
        """Returns the receiver for requests of `method` ("/package.Service/Method")."""
        if method.strip("/").partition("/")[0] in self._open_services:
            return self._open_reads
        return self._slots if has_images else self._short_reads


class Inbox:
    """The messages that a caller sends, parsed: one of a unary request, or a stream of them."""

    def __init__(self, context: Any, call: Call, receiver: Receiver, parse: Callable[[bytes], Awaitable[Any]]) -> None:
        """`context` is the context of `call`, whose handler is, to gRPC, one with a stream of requests."""
        self._context = context
        self._call = call
        self._receiver = receiver
        self._parse = parse
        self._has_begun = False

    async def only_message(self) -> Any:
        """Receives a unary request.

        Raises InvalidInputError if there is none, and the errors of `Receiver.receive`. Further messages are not read,
        as gRPC does it in Python: to look for them takes 7 % of the time of a short call.
        """
        message = await self._receive(may_pause=False)
        if message is grpc.aio.EOF:
            await asyncio.sleep(_CANCELLATION_S)
            raise InvalidInputError("the call has no request message; send one")
        return await self._parsed(message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Receives the next message of a stream, which may pause but not begin late."""
        message = await self._receive(may_pause=self._has_begun)
        self._has_begun = True
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return await self._parsed(message)

    async def _parsed(self, message: bytes) -> Any:
        if len(message) <= _LARGE_BYTES:
            return await self._parse(message)
        await asyncio.sleep(_PAUSE_S)
        parsed = await self._parse(message)
        await asyncio.sleep(_PAUSE_S)
        return parsed

    async def _receive(self, *, may_pause: bool) -> Any:
        receive = self._receiver.receive(self._caller(), self._context.read, may_pause=may_pause)
        return await self._call.received(receive)

    def _caller(self) -> str:
        """Returns the tenant; without authentication the connection, since a caller could name any tenant then."""
        identity = current_identity()
        if not identity.is_authenticated:
            return str(self._context.peer())
        return f"tenant {identity.tenant}"
