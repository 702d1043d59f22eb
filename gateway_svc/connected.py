"""Ends work for clients that have gone, and sends answers as events (server-sent events, WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway_svc.interruptions import Interruptions
from lookonce.errors import LookonceError

ResultT = TypeVar("ResultT")

_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies such as nginx would collect the answer.
    "x-accel-buffering": "no",
}


class ClientGoneError(Exception):
    """The client has closed its connection; nobody waits for the answer."""


async def while_connected(
    receive: Receive, interruptions: Interruptions, work: Coroutine[Any, Any, ResultT]
) -> ResultT:
    """Returns the result of `work`, or cancels it when the client goes, and raises ClientGoneError.

    Raises the error of an interruption in the same way. The body of the request must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    interrupted = asyncio.ensure_future(interruptions.next())
    try:
        await asyncio.wait({working, watching, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if interrupted.done():
            raise interrupted.result()
        raise ClientGoneError
    finally:
        for task in (working, watching, interrupted):
            task.cancel()
        await asyncio.gather(working, watching, interrupted, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer that is sent event by event. It ends the generator when the client goes."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        interruptions: Interruptions,
        failure: Callable[[LookonceError], bytes],
        exits: AsyncExitStack,
    ) -> None:
        """`failure` makes the last event of an answer that is interrupted. `exits` is closed at the end."""
        super().__init__(headers=_EVENT_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._interruptions = interruptions
        self._failure = failure
        self._exits = exits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; returns when all are sent or the client has gone."""
        try:
            await while_connected(receive, self._interruptions, self._send(send))
        except ClientGoneError:
            pass
        except LookonceError as error:
            await send({"type": "http.response.body", "body": self._failure(error), "more_body": False})
        finally:
            await self._events.aclose()
            await self._exits.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
