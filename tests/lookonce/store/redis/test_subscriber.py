"""A subscription ends when its process does."""

from __future__ import annotations

import asyncio
from typing import Any

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.redis.subscriber import RedisSubscriber

BUDGET_S = 5.0


async def test_closing_ends_a_listener_whose_cancellation_becomes_another_error() -> None:
    """Covers a cancelled redis-py that takes too long to close its connection."""
    listening = asyncio.Event()
    num_lost = 0

    async def listen(client: Any) -> None:
        listening.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise TimeoutError from None

    def lost() -> None:
        nonlocal num_lost
        num_lost += 1

    with EmbeddedRedis() as server:
        subscriber = RedisSubscriber(server.url, BUDGET_S, "a test")
        subscriber.start(listen, lost)
        async with asyncio.timeout(60):
            await listening.wait()
            await subscriber.close()
        keepers = [task for task in asyncio.all_tasks() if "_keep" in repr(task)]
        assert keepers == []
        assert num_lost == 1


async def test_closing_is_quick_when_the_listener_goes_on_after_its_cancellation() -> None:
    listening = asyncio.Event()
    num_cancelled = 0

    async def listen(_: Any) -> None:
        nonlocal num_cancelled
        listening.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            # redis-py: its own timeout ended at the same moment and took the cancellation's place.
            num_cancelled += 1
        await asyncio.sleep(3600)

    with EmbeddedRedis() as server:
        subscriber = RedisSubscriber(server.url, 60.0, "a test")
        subscriber.start(listen, lambda: None)
        async with asyncio.timeout(30):
            await listening.wait()
            await subscriber.close()
    assert num_cancelled == 1
