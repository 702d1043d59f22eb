"""Receives the messages about images to forget, and detects messages that it missed. Runs on the event loop.

A process that is not subscribed misses messages on a Redis channel. So each message has a random token, which is stored
in Redis before the message is sent. A process that finds another token there than the last one it received forgets all
images, which costs time only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lookonce.forgotten import EVERYTHING, NOTHING, TOKEN_BYTES, Forgotten, parse_message
from lookonce.store.cache_names import FORGET_CHANNEL, FORGET_TOKEN
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.miss_reason import CacheMissError
from lookonce.store.redis.subscriber import RedisSubscriber

_POLL_S = 1.0
# Interval of checks of the stored token while no message arrives, since a dead connection may look idle.
_CHECK_S = 5.0
# Messages that are remembered for `removed_since`. Older requests are taken for ones whose images were removed.
_MAX_RECENT = 1024


class ForgetListener:
    """The subscription of one process. Trouble with Redis delays messages until it is back; nothing raises."""

    def __init__(
        self, url: str, budget_s: float, forget: Callable[[Forgotten], None], *, check_s: float = _CHECK_S
    ) -> None:
        """`budget_s`: longest time for connecting and for closing, seconds. `forget` is called for each message.

        `forget` must not block. `check_s`: interval of checks for missed messages, seconds.
        """
        self._subscriber = RedisSubscriber(url, budget_s, "the forget channel")
        self._budget_s = budget_s
        self._forget = forget
        self._check_s = check_s
        # Token of the last message that was received or found to be missed; empty when there was none yet.
        self._token = b""
        # The last messages with their tokens, and what was forgotten when messages were missed. Oldest first.
        self._recent = deque([(self._token, NOTHING)], _MAX_RECENT)
        self._is_listening = asyncio.Event()
        self._has_listened = False

    @property
    def is_listening(self) -> bool:
        """Whether a message sent now would be received."""
        return self._is_listening.is_set()

    @property
    def last_token(self) -> bytes | None:
        """Token of the last message, empty when there was none yet; None while messages might be missed."""
        return self._token if self.is_listening else None

    @property
    def heard_token(self) -> bytes | None:
        """Token of the last message that was heard, also while messages might be missed; None before the first look."""
        return self._token if self._has_listened else None

    def has_heard(self, token: bytes) -> bool:
        """Returns whether the message with this token was received, also if later ones were."""
        return any(token == heard for heard, _ in reversed(self._recent))

    def removed_since(self, token: bytes, key: bytes, file_tags: Sequence[bytes]) -> bool:
        """Returns whether an image was removed after the message with this token; True where that is not known.

        `key` is its ContentKey.value, and `file_tags` are those of its files.
        """
        for heard, forgotten in reversed(self._recent):
            if heard == token:
                return False
            if forgotten.includes(key, file_tags):
                return True
        return True

    def start(self) -> None:
        """Starts to listen; call this on the event loop."""
        self._subscriber.start(self._listen, self._is_listening.clear, FORGET_TOKEN)

    async def wait_until_listening(self) -> None:
        """Returns once every later message will be received."""
        await self._is_listening.wait()

    async def close(self) -> None:
        """Closes the connection and stops listening."""
        await self._subscriber.close()

    async def _listen(self, client: Any) -> None:
        """Receives messages until the connection breaks or a message turns out to be missed."""
        async with client.pubsub() as subscription:
            await subscription.subscribe(FORGET_CHANNEL)
            async with asyncio.timeout(max(self._budget_s, _POLL_S)):
                while not _is_confirmation(await subscription.get_message(timeout=_POLL_S)):
                    pass
            await self._check_token(client)
            self._has_listened = True
            self._is_listening.set()
            checked_s = time.monotonic()
            while True:
                message = await subscription.get_message(timeout=_POLL_S)
                if message is not None and message["type"] == "message":
                    token, forgotten = parse_message(message["data"])
                    # In this order: who reads the token in another thread relies on what was forgotten by then.
                    self._forget(forgotten)
                    self._note(token, forgotten)
                elif time.monotonic() - checked_s >= self._check_s:
                    checked_s = time.monotonic()
                    if await self._check_token(client):
                        return

    async def _check_token(self, client: Any) -> bool:
        """Compares the stored token with the last one. If a message was missed, forgets all images and returns True."""
        async with asyncio.timeout(max(self._budget_s, _POLL_S)):
            token = await client.get(FORGET_TOKEN) or b""
        if token == self._token:
            return False
        self._forget(EVERYTHING)
        self._note(token, EVERYTHING)
        return True

    def _note(self, token: bytes, forgotten: Forgotten) -> None:
        self._token = token
        self._recent.append((token, forgotten))


def token_in(store: EmbeddingStore) -> bytes | None:
    """Returns the token stored in the cache; empty when there is none, None for any failure. Blocks."""
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
