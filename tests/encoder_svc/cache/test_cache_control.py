"""Operators' actions reach every tier that exists, and without a shared cache they concern this process only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from encoder_svc.cache.cache_admin import CacheAdmin
from encoder_svc.cache.cache_control import CacheControl
from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.metrics import EncoderMetrics
from lookonce.content_key import EncoderFingerprint
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.forget_channel import ForgetListener
from tests.lookonce.store.entries import SMALL, fresh_key, make_rows, write

ENTRY = LocalEmbedding(SMALL, memoryview(make_rows(SMALL)).toreadonly(), 1.0)
# The fingerprint of fresh_key()'s keys.
FINGERPRINT = EncoderFingerprint("f" * 64)
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Caches:
    """One encoder's tiers and the operators' control over them."""

    tiers: CacheTiers
    control: CacheControl


@contextlib.asynccontextmanager
async def opened(url: str | None, restore_s: float = 0.01) -> AsyncIterator[Caches]:
    async with contextlib.AsyncExitStack() as stack:
        store = None
        admin = None
        if url is not None:
            store = stack.enter_context(contextlib.closing(EmbeddingStore(url, 5.0, 60, 1 << 20)))
            admin = CacheAdmin(url)
        tiers = CacheTiers(LocalCache(1 << 20), store, EncoderMetrics(CollectorRegistry()), num_threads=1)
        stack.callback(tiers.close)
        control = CacheControl(tiers, admin, FINGERPRINT, ttl_s=30, restore_s=restore_s)
        stack.callback(control.close)
        yield Caches(tiers, control)


@pytest.fixture
async def alone() -> AsyncIterator[Caches]:
    """An encoder without a shared cache."""
    async with opened(None) as caches:
        yield caches


@pytest.fixture
async def shared(own_redis: EmbeddedRedis) -> AsyncIterator[Caches]:
    """An encoder with a shared cache of its own."""
    async with opened(own_redis.url) as caches:
        yield caches


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_without_a_shared_cache_an_eviction_empties_this_process_and_counts_nothing(alone: Caches) -> None:
    keys = [fresh_key() for _ in range(3)]
    for key in keys:
        await alone.tiers.put(key, ENTRY, refresh=False)
    assert alone.control.local_statistics().num_entries == 3
    assert await alone.control.evict(keys[:1]) == 0
    assert [alone.control.is_local(key) for key in keys] == [False, True, True]
    assert await alone.control.evict_all() == 0
    assert alone.control.local_statistics().num_bytes == 0


async def test_without_a_shared_cache_nothing_is_pinned_and_nothing_is_described(alone: Caches) -> None:
    keys = [fresh_key(), fresh_key()]
    await alone.tiers.put(keys[0], ENTRY, refresh=False)
    for unpin in (False, True):
        assert await alone.control.pin(keys, unpin=unpin) == [False, False]
    assert await alone.control.describe(keys) == [None, None]
    assert [await alone.control.prewarm(key) for key in keys] == [True, False]
    assert (await alone.control.shared_statistics()).num_entries == 0


async def test_an_unpinned_entry_lives_as_long_as_a_new_one(shared: Caches) -> None:
    key = fresh_key()
    assert await shared.tiers.put(key, ENTRY, refresh=False)
    assert await shared.control.pin([key, fresh_key()], unpin=False) == [True, False]
    (pinned,) = await shared.control.describe([key])
    assert pinned is not None
    assert pinned.ttl_s is None
    assert await shared.control.pin([key], unpin=True) == [True]
    (unpinned,) = await shared.control.describe([key])
    assert unpinned is not None
    assert unpinned.ttl_s is not None
    assert 0 < unpinned.ttl_s <= 30


async def test_statistics_count_this_process_s_hits_and_the_server_s_entries(shared: Caches) -> None:
    key = fresh_key()
    assert await shared.tiers.put(key, ENTRY, refresh=False)
    for one in (key, fresh_key()):
        shared.tiers.find_local(one)
        await shared.tiers.find_shared(one)
    local, stored = shared.control.local_statistics(), await shared.control.shared_statistics()
    for tier in (local, stored):
        assert (tier.num_entries, tier.num_hits, tier.num_misses) == (1, 1, 1)
    assert (local.num_bytes, local.capacity_bytes) == (SMALL.size_bytes, 1 << 20)


async def test_an_eviction_is_announced_before_and_after_it(shared: Caches, own_redis: EmbeddedRedis) -> None:
    key = fresh_key()
    assert await shared.tiers.put(key, ENTRY, refresh=False)
    heard: list[Forgotten] = []
    listener = ForgetListener(own_redis.url, 1.0, heard.append)
    listener.start()
    async with asyncio.timeout(TIMEOUT_S):
        await listener.wait_until_listening()
    assert await shared.control.evict([key]) == 1
    await settled(lambda: len(heard) == 2)
    assert heard == [Forgotten.of([key])] * 2
    assert await shared.tiers.find_shared(key) is None
    await shared.control.evict_all()
    await settled(lambda: len(heard) == 4)
    assert heard[2:] == [EVERYTHING] * 2
    await listener.close()


async def test_a_copy_that_another_replica_writes_back_meanwhile_is_removed_too(own_redis: EmbeddedRedis) -> None:
    key = fresh_key()
    async with opened(own_redis.url, restore_s=2.0) as caches:
        store = caches.tiers.store
        assert store is not None
        assert await caches.tiers.put(key, ENTRY, refresh=False)
        evicting = asyncio.create_task(caches.control.evict([key]))
        await settled(lambda: store.stat(key) is None)
        assert write(store, key, SMALL, ENTRY.rows)
        assert await evicting == 1
        assert store.stat(key) is None


async def test_prewarming_brings_rows_of_the_shared_cache_into_this_process(shared: Caches) -> None:
    store = shared.tiers.store
    assert store is not None
    key = fresh_key()
    assert write(store, key, SMALL, ENTRY.rows)
    assert not shared.control.is_local(key)
    assert await shared.control.prewarm(key)
    found = shared.tiers.find_local(key)
    assert found is not None
    assert bytes(found.rows) == bytes(ENTRY.rows)
    assert not await shared.control.prewarm(fresh_key())
