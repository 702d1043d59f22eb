"""Messages from other replicas that an encode has ended. One subscription per process, on the event loop.

They only shorten waits: a waiting replica also looks into the cache itself, and more often while it is not subscribed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import redis.exceptions

from lookonce.content_key import ContentKey
from lookonce.logs import get_logger
from lookonce.store.cache_names import done_channel
from lookonce.store.redis.subscriber import RedisSubscriber

_log = get_logger(__name__)

# A connection must be subscribed to something; this channel keeps it open while nobody waits.
_IDLE_CHANNEL = b"lookonce:idle"
_POLL_S = 1.0


@dataclass(slots=True, eq=False)
class Listener:
    """One waiting caller, and the message that ends its wait."""

    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    # The holder's announcement; None before it came.
    outcome: bytes | None = None

    async def wait(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` seconds. Returns whether the end was announced."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def end(self, outcome: bytes) -> None:
        """Stores the announcement and wakes the waiting caller."""
        self.outcome = outcome
        self._ended.set()


class DoneChannel:
    """Listeners by key on one shared connection. When Redis fails, no message comes; nothing is raised."""

    def __init__(self, url: str, budget_s: float) -> None:
        """`budget_s`: maximum time to connect or to change one subscription, seconds."""
        self._subscriber = RedisSubscriber(url, budget_s, "the done channel")
        # None before the first connection.
        self._subscription: Any = None
        self._budget_s = budget_s
        self._listeners: dict[bytes, set[Listener]] = {}
        self._is_connected = False
        # Held while a command is sent and while the subscription is closed: redis-py would silently open a new
        # connection, which nobody closes, for a command to a closed one.
        self._commanding = asyncio.Lock()
        self._commands: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        """Whether messages arrive. While they do not, look into the cache more often."""
        return self._is_connected

    def start(self) -> None:
        """Starts listening in a task. Call it on the event loop."""
        self._subscriber.start(self._listen, self._lose)

    async def close(self) -> None:
        """Closes the connection; listeners get no more messages."""
        await asyncio.gather(*self._commands)
        await self._subscriber.close()

    @contextlib.asynccontextmanager
    async def listening(self, key: ContentKey) -> AsyncIterator[Listener]:
        """Listens for the end of this key's encode while the block runs."""
        channel = done_channel(key)
        listener = Listener()
        others = self._listeners.setdefault(channel, set())
        others.add(listener)
        try:
            if len(others) == 1:
                await self._command("subscribe", channel)
            yield listener
        finally:
            others.discard(listener)
            if not others and self._listeners.get(channel) is others:
                del self._listeners[channel]
                await self._command("unsubscribe", channel)

    async def _command(self, command: str, channel: bytes) -> None:
        """Subscribes or unsubscribes, in a task of its own.

        redis-py may raise a TimeoutError in place of a cancellation: a caller that was cancelled would wait on.
        """
        task = asyncio.create_task(self._send(command, channel))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        await asyncio.shield(task)

    async def _send(self, command: str, channel: bytes) -> None:
        """Sends a command. After a failure the reading task makes a new connection."""
        try:
            async with asyncio.timeout(self._budget_s), self._commanding:
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
            async with self._commanding:
                await self._subscription.aclose()

    def _lose(self) -> None:
        self._is_connected = False
