"""Ends work for clients that have gone, and sends answers as events (server-sent events, WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ResultT = TypeVar("ResultT")

_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies such as nginx would collect the answer.
    "x-accel-buffering": "no",
}


class ClientGoneError(Exception):
    """The client has closed its connection; nobody waits for the answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Returns the result of `work`, or cancels it when the client goes, and raises ClientGoneError.

    The body of the request must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer that is sent event by event. It ends the generator when the client goes."""

    def __init__(
        self, events: AsyncGenerator[bytes], exits: AsyncExitStack, headers: Mapping[str, str] | None = None
    ) -> None:
        """`exits` is closed at the end of the answer."""
        super().__init__(headers={**_EVENT_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._exits = exits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; returns when all are sent or the client has gone."""
        try:
            await while_connected(receive, self._send(send))
        except ClientGoneError:
            pass
        finally:
            await self._events.aclose()
            await self._exits.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
