"""Hears which images are to be forgotten, and notices what it could not hear. Lives on the event loop.

Messages on a Redis channel are lost while nobody listens, so a counter in Redis says how many there were: whoever comes
back and finds another count forgets everything, which costs time only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import redis.exceptions
import structlog

from lookonce.cache_names import FORGET_CHANNEL, FORGET_COUNTER
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.miss_reason import RedisTroubleError
from lookonce.redis_subscriber import RedisSubscriber

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_POLL_S = 1.0
_RECONNECT_S = 1.0


class ForgetListener:
    """One subscription of a process. Trouble with Redis is silence until it is back, never an exception."""

    def __init__(self, url: str, budget_s: float, forget: Callable[[Forgotten], None]) -> None:
        """`budget_s`: longest time of connecting and of ending, seconds. `forget` must not block."""
        self._subscriber = RedisSubscriber(url, budget_s)
        self._budget_s = budget_s
        self._forget = forget
        self._reader: asyncio.Task[None] | None = None
        # The counter as it was last seen; None before the first time, when nothing is kept yet.
        self._num_forgets: int | None = None
        self._is_listening = asyncio.Event()

    def start(self) -> None:
        """Begins to listen; call it on the event loop."""
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def wait_until_listening(self) -> None:
        """Returns once every later message is heard."""
        await self._is_listening.wait()

    async def close(self) -> None:
        """Ends the connection."""
        if self._reader is not None:
            self._reader.cancel()
            # Bounded, like all that a process waits for while it ends.
            await asyncio.wait({self._reader}, timeout=self._budget_s)
        await self._subscriber.close()

    async def _read(self) -> None:
        while True:
            try:
                await self._listen()
            except (RedisTroubleError, redis.exceptions.RedisError, OSError, TimeoutError) as error:
                _log.debug("the forget channel is away", reason=type(error).__name__)
            except Exception:
                _log.exception("the forget channel failed")
            self._is_listening.clear()
            await asyncio.sleep(_RECONNECT_S)

    async def _listen(self) -> None:
        client = await self._subscriber.connect(FORGET_COUNTER)
        async with client.pubsub(ignore_subscribe_messages=True) as subscription:
            await subscription.subscribe(FORGET_CHANNEL)
            # After the subscription, so that nothing in between is missed.
            await self._catch_up(client)
            self._is_listening.set()
            while True:
                message = await subscription.get_message(timeout=_POLL_S)
                if message is not None and message["type"] == "message":
                    self._forget(Forgotten.from_bytes(message["data"]))
                    self._num_forgets = await self._count(client)

    async def _catch_up(self, client: Any) -> None:
        num_forgets = await self._count(client)
        if self._num_forgets is not None and num_forgets != self._num_forgets:
            self._forget(EVERYTHING)
        self._num_forgets = num_forgets

    async def _count(self, client: Any) -> int:
        async with asyncio.timeout(max(self._budget_s, 1.0)):
            value = await client.get(FORGET_COUNTER)
        return int(value or 0)
