"""The health of the shared cache follows the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.health import PART_NAME, CacheHealth, watched_cache
from lookonce.store.redis.circuit_breaker import CircuitBreaker
from tests.lookonce.store.faults import kill_child

MakeStore = Callable[..., EmbeddingStore]
TIMEOUT_S = 20.0


async def becomes(health: CacheHealth, *, is_healthy: bool) -> None:
    """Waits until the latest ping had this result."""
    async with asyncio.timeout(TIMEOUT_S):
        while health.is_healthy() is not is_healthy:
            await asyncio.sleep(0.01)


async def test_the_cache_is_healthy_while_the_server_answers(own_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store = make_store(own_redis.url, breaker=CircuitBreaker(failure_threshold=1_000_000))
    health = CacheHealth(store, interval_s=0.01)
    assert health.is_healthy(), "nothing is known to be wrong before the first ping"
    health.start()
    try:
        kill_child(own_redis.pid)
        await becomes(health, is_healthy=False)
        own_redis.start()
        await becomes(health, is_healthy=True)
    finally:
        await health.close()


async def test_after_close_there_are_no_more_pings(own_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store = make_store(own_redis.url)
    health = CacheHealth(store, interval_s=0.01)
    health.start()
    async with asyncio.timeout(TIMEOUT_S):
        while not store.stats.snapshot():
            await asyncio.sleep(0.01)
    await health.close()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_close_before_start_does_nothing(own_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    await CacheHealth(make_store(own_redis.url)).close()


async def test_a_process_with_a_store_reports_one_part_and_without_one_none(
    own_redis: EmbeddedRedis, make_store: MakeStore
) -> None:
    async with watched_cache(make_store(own_redis.url)) as parts:
        assert list(parts) == [PART_NAME]
        assert parts[PART_NAME]()
    async with watched_cache(None) as parts:
        assert parts == {}
