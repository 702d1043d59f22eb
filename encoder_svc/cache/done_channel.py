"""Hears from other replicas that an encode has ended. One subscription connection per process, on the event loop.

Only a way to wait less: whoever waits looks for itself, too, and often when this hears nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import redis.exceptions
import structlog

from lookonce.content_key import ContentKey
from lookonce.store.cache_names import done_channel
from lookonce.store.redis.subscriber import RedisSubscriber

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Keeps the connection subscribed to something while nobody waits.
_IDLE_CHANNEL = b"lookonce:idle"
_POLL_S = 1.0


@dataclass(slots=True, eq=False)
class Listener:
    """One wait for the end of one key's encode."""

    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    # What the holder said came of it; None before it did.
    outcome: bytes | None = None

    async def wait(self, timeout_s: float) -> bool:
        """Whether the end came within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def end(self, outcome: bytes) -> None:
        """Wakes whoever waits."""
        self.outcome = outcome
        self._ended.set()


class DoneChannel:
    """Subscriptions by key. Trouble with Redis is silence, never an exception."""

    def __init__(self, url: str, budget_s: float) -> None:
        """`budget_s`: longest time of connecting and of one subscription's command, seconds."""
        self._subscriber = RedisSubscriber(url, budget_s, "the done channel")
        # None before the first connection.
        self._subscription: Any = None
        self._budget_s = budget_s
        self._listeners: dict[bytes, set[Listener]] = {}
        self._is_connected = False
        # Held by who tells the subscription something: a closed one would connect again for that, for good.
        self._telling = asyncio.Lock()

    @property
    def is_connected(self) -> bool:
        """Whether an end would be heard; if not, look more often."""
        return self._is_connected

    def start(self) -> None:
        """Begins to listen; call it on the event loop."""
        self._subscriber.start(self._listen, self._lose)

    async def close(self) -> None:
        """Ends the connection; who waits hears nothing more."""
        await self._subscriber.close()

    @contextlib.asynccontextmanager
    async def listening(self, key: ContentKey) -> AsyncIterator[Listener]:
        """Hears the end of this key's encode from now on."""
        channel = done_channel(key)
        listener = Listener()
        others = self._listeners.setdefault(channel, set())
        others.add(listener)
        try:
            if len(others) == 1:
                await self._tell("subscribe", channel)
            yield listener
        finally:
            others.discard(listener)
            if not others and self._listeners.get(channel) is others:
                del self._listeners[channel]
                await self._tell("unsubscribe", channel)

    async def _tell(self, command: str, channel: bytes) -> None:
        """Subscribes or unsubscribes; a connection that takes neither is the reader's to renew."""
        try:
            async with asyncio.timeout(self._budget_s), self._telling:
                if self._is_connected:
                    await getattr(self._subscription, command)(channel)
        except (redis.exceptions.RedisError, OSError, TimeoutError):
            self._is_connected = False

    async def _listen(self, client: Any) -> None:
        self._subscription = client.pubsub(ignore_subscribe_messages=True)
        try:
            await self._subscription.subscribe(_IDLE_CHANNEL, *self._listeners)
            self._is_connected = True
            while self._is_connected:
                message = await self._subscription.get_message(timeout=_POLL_S)
                if message is not None and message["type"] == "message":
                    for listener in self._listeners.get(message["channel"], ()):
                        listener.end(message["data"])
        finally:
            self._is_connected = False
            async with self._telling:
                await self._subscription.aclose()

    def _lose(self) -> None:
        self._is_connected = False
