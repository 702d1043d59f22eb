"""Clients that hold a call open: they take no byte of its answer, or do not send all of its request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.lookonce.server import raw_calls

WATCH = "/grpc.health.v1.Health/Watch"


@asynccontextmanager
async def silent_client(
    target: str, method: str = WATCH, *, num_sent: int | None = None
) -> AsyncIterator[asyncio.Task[bytes]]:
    """Calls a method and takes no byte of the answer, which has begun. With `num_sent`, its request does not end.

    The client acknowledges pings, so that gRPC does not take it for dead. Yields a task that returns the headers that
    the client got when the server has closed the connection.
    """
    with await asyncio.to_thread(raw_calls.connect, target, window_bytes=0) as connection:
        message = b"" if num_sent is None else bytes(1000)
        connection.sendall(raw_calls.call(1, method, message, num_sent=num_sent))
        if num_sent is None:
            await asyncio.to_thread(raw_calls.wait_until_answered, connection)
        else:
            await asyncio.to_thread(raw_calls.wait_until_read, connection)
        headers = asyncio.create_task(asyncio.to_thread(raw_calls.answer_pings, connection))
        try:
            yield headers
        finally:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            await asyncio.gather(headers, return_exceptions=True)
