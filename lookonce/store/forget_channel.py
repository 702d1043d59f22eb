"""Hears which images are to be forgotten, and notices what it could not hear. Lives on the event loop.

Messages on a Redis channel are lost while nobody listens. So each has a random token, which also lies in Redis from
before it is sent: whoever finds another token there than the one it heard last forgets everything, which costs time
only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from lookonce.forgotten import EVERYTHING, TOKEN_BYTES, Forgotten, parse_message
from lookonce.store.cache_names import FORGET_CHANNEL, FORGET_TOKEN
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.miss_reason import CacheMissError
from lookonce.store.redis.subscriber import RedisSubscriber

_POLL_S = 1.0
# Between looks at the token while nothing is heard: a connection may be dead without saying so.
_CHECK_S = 5.0


class ForgetListener:
    """One subscription of a process. Trouble with Redis is silence until it is back, never an exception."""

    def __init__(
        self, url: str, budget_s: float, forget: Callable[[Forgotten], None], *, check_s: float = _CHECK_S
    ) -> None:
        """`budget_s`: longest time of connecting and of ending, seconds. `forget` must not block."""
        self._subscriber = RedisSubscriber(url, budget_s, "the forget channel")
        self._budget_s = budget_s
        self._forget = forget
        self._check_s = check_s
        # Of the last message that was heard, or found to have been missed; empty where there never was one.
        self._token = b""
        self._is_listening = asyncio.Event()

    @property
    def is_listening(self) -> bool:
        """Whether every message of now would be heard."""
        return self._is_listening.is_set()

    @property
    def heard(self) -> bytes | None:
        """Token of the last message, empty where there never was one; None while messages might be missed."""
        return self._token if self.is_listening else None

    def start(self) -> None:
        """Begins to listen; call it on the event loop."""
        self._subscriber.start(self._listen, self._is_listening.clear, FORGET_TOKEN)

    async def wait_until_listening(self) -> None:
        """Returns once every later message is heard."""
        await self._is_listening.wait()

    async def close(self) -> None:
        """Ends the connection."""
        await self._subscriber.close()

    async def _listen(self, client: Any) -> None:
        """Until the connection breaks, or a message turns out to be missing."""
        async with client.pubsub() as subscription:
            await subscription.subscribe(FORGET_CHANNEL)
            async with asyncio.timeout(max(self._budget_s, _POLL_S)):
                while not _is_confirmation(await subscription.get_message(timeout=_POLL_S)):
                    pass
            await self._find_out(client)
            self._is_listening.set()
            checked_s = time.monotonic()
            while True:
                message = await subscription.get_message(timeout=_POLL_S)
                if message is not None and message["type"] == "message":
                    self._token, forgotten = parse_message(message["data"])
                    self._forget(forgotten)
                elif time.monotonic() - checked_s >= self._check_s:
                    checked_s = time.monotonic()
                    if await self._find_out(client):
                        return

    async def _find_out(self, client: Any) -> bool:
        """Whether there was a message that was not heard; if so, everything is forgotten."""
        async with asyncio.timeout(max(self._budget_s, _POLL_S)):
            token = await client.get(FORGET_TOKEN) or b""
        if token == self._token:
            return False
        self._token = token
        self._forget(EVERYTHING)
        return True


def token_in(store: EmbeddingStore) -> bytes | None:
    """Of the last message, from the cache itself; empty where there never was one, None for any trouble. Blocks."""
    token = memoryview(bytearray(TOKEN_BYTES))

    def get(exchange: Exchange) -> bytes:
        exchange.send(b"GETRANGE", FORGET_TOKEN, 0, TOKEN_BYTES - 1)
        return bytes(token[: exchange.read_bulk_into(token)])

    try:
        return store.ask(get, FORGET_TOKEN)
    except CacheMissError:
        return None


def _is_confirmation(message: Any) -> bool:
    return message is not None and message["type"] == "subscribe"
