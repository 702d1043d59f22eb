"""Operators' actions reach every tier that exists, and without a shared cache they concern this process only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest
import redis
from prometheus_client import CollectorRegistry

from encoder_svc.cache.cache_admin import CacheAdmin, RemovedEntries
from encoder_svc.cache.cache_control import CacheControl, Eviction
from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.metrics import EncoderMetrics
from lookonce.content_key import DEFAULT_TENANT, ContentKey, EncoderFingerprint, ProcessorOptions, content_key, file_tag
from lookonce.errors import UnavailableError
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.forget_channel import ForgetListener
from tests.lookonce.store.entries import SMALL, data_key, fresh_key, make_rows, write

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
async def opened(url: str | None, restore_s: float = 0.01, capacity_bytes: int = 1 << 20) -> AsyncIterator[Caches]:
    async with contextlib.AsyncExitStack() as stack:
        store = None
        admin = None
        if url is not None:
            store = stack.enter_context(contextlib.closing(EmbeddingStore(url, 5.0, 60, 1 << 20)))
            admin = CacheAdmin(url)
        tiers = CacheTiers(LocalCache(capacity_bytes), store, EncoderMetrics(CollectorRegistry()), num_threads=1)
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


def tag_of(key: ContentKey) -> bytes:
    """Returns the tag of the file that the key names."""
    return file_tag(key.digest, DEFAULT_TENANT)


def entry_of(*keys: ContentKey) -> LocalEmbedding:
    """Returns rows made from the files of these keys."""
    return replace(ENTRY, meta=replace(SMALL, file_tags=tuple(tag_of(key) for key in keys)))


async def evicted(caches: Caches, key: ContentKey) -> int:
    """Removes the key's image and returns the number of removed entries."""
    return (await caches.control.evict([key.digest], [key], DEFAULT_TENANT)).num_entries


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_without_a_shared_cache_an_eviction_empties_this_process_and_counts_nothing(alone: Caches) -> None:
    keys = [fresh_key() for _ in range(3)]
    for key in keys:
        await alone.tiers.put(key, entry_of(key), refresh=False)
    assert alone.control.local_statistics().num_entries == 3
    assert await evicted(alone, keys[0]) == 0
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


async def test_both_passes_of_an_eviction_are_announced_before_and_after_them(
    shared: Caches, own_redis: EmbeddedRedis
) -> None:
    key = fresh_key()
    assert await shared.tiers.put(key, ENTRY, refresh=False)
    heard: list[Forgotten] = []
    listener = ForgetListener(own_redis.url, 1.0, heard.append)
    listener.start()
    async with asyncio.timeout(TIMEOUT_S):
        await listener.wait_until_listening()
    assert await evicted(shared, key) == 1
    await settled(lambda: len(heard) == 4)
    assert heard == [Forgotten.of_files([tag_of(key)])] * 4
    assert await shared.tiers.find_shared(key) is None
    await shared.control.evict_all()
    await settled(lambda: len(heard) == 8)
    assert heard[4:] == [EVERYTHING] * 4
    await listener.close()


async def test_a_copy_that_another_replica_writes_back_meanwhile_is_removed_too(own_redis: EmbeddedRedis) -> None:
    key = fresh_key()
    async with opened(own_redis.url, restore_s=2.0) as caches:
        store = caches.tiers.store
        assert store is not None
        assert await caches.tiers.put(key, ENTRY, refresh=False)
        evicting = asyncio.create_task(evicted(caches, key))
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


def other_entry(key: ContentKey, fingerprint: str = FINGERPRINT, max_pixels: int | None = None) -> ContentKey:
    """Returns the key of the same image under another encoder or with another option."""
    return content_key(key.digest, EncoderFingerprint(fingerprint), ProcessorOptions(max_pixels), DEFAULT_TENANT)


async def test_an_image_goes_with_all_entries_and_pairs_and_no_other_image_does(own_redis: EmbeddedRedis) -> None:
    gone, kept = fresh_key(), fresh_key()
    entries = {
        gone: entry_of(gone),
        other_entry(gone, max_pixels=1000): entry_of(gone),
        other_entry(gone, "e" * 64): entry_of(gone),
        fresh_key(): entry_of(gone, kept),
        fresh_key(): entry_of(kept, gone),
    }
    others = {kept: entry_of(kept), fresh_key(): entry_of(kept, kept)}
    async with opened(own_redis.url) as caches, opened(own_redis.url) as elsewhere:
        for key, entry in (entries | others).items():
            assert await caches.tiers.put(key, entry, refresh=False)
            assert await elsewhere.control.prewarm(key)
        listener = ForgetListener(own_redis.url, 1.0, elsewhere.tiers.forget)
        listener.start()
        await listener.wait_until_listening()
        assert await elsewhere.control.prewarm(kept)
        for key in entries:
            assert await elsewhere.control.prewarm(key), "a listener that joins forgets all it had"
        eviction = await caches.control.evict([gone.digest], [gone], DEFAULT_TENANT)
        assert eviction == Eviction(5, [RemovedEntries(num_images=3, num_pairs=2)])
        await settled(lambda: not any(elsewhere.tiers.holds(key) for key in entries))
        assert not any(caches.tiers.holds(key) for key in entries)
        assert await caches.control.describe(list(entries)) == [None] * 5
        assert None not in await caches.control.describe(list(others))
        assert all(caches.tiers.holds(key) for key in others)
        assert elsewhere.tiers.holds(kept)
        await listener.close()


async def test_entries_whose_files_are_not_known_go_with_any_image_of_their_tenant(shared: Caches) -> None:
    store = shared.tiers.store
    assert store is not None
    older, asked = fresh_key(), fresh_key()
    assert write(store, older, SMALL, ENTRY.rows), "an encoder without file tags wrote this"
    assert write(store, asked, SMALL, ENTRY.rows)
    eviction = await shared.control.evict([asked.digest], [asked], DEFAULT_TENANT)
    assert eviction == Eviction(2, [RemovedEntries(num_images=1)])
    assert await shared.control.describe([older, asked]) == [None, None]
    assert store.metadata(older) is None


async def test_metadata_without_rows_goes_too(shared: Caches, own_redis: EmbeddedRedis) -> None:
    store, key, kept = shared.tiers.store, fresh_key(), fresh_key()
    assert store is not None
    for one in (key, kept):
        assert await shared.tiers.put(one, entry_of(one), refresh=False)
    with redis.Redis.from_url(own_redis.url) as server:
        server.delete(data_key(key))
    assert await evicted(shared, fresh_key()) == 0
    assert (store.metadata(key), store.metadata(kept)) == (None, SMALL)


async def test_a_pair_can_be_removed_alone(shared: Caches) -> None:
    frame, pair, other = fresh_key(), fresh_key(), fresh_key()
    assert await shared.tiers.put(frame, entry_of(frame), refresh=False)
    for one in (pair, other):
        assert await shared.tiers.put(one, entry_of(frame, frame), refresh=False)
    assert await shared.control.evict_pairs([pair, fresh_key()]) == Eviction(
        1, [RemovedEntries(num_pairs=1), RemovedEntries()]
    )
    assert [entry is not None for entry in await shared.control.describe([frame, pair, other])] == [True, False, True]


async def test_prewarming_says_when_redis_cannot_be_asked(own_redis: EmbeddedRedis) -> None:
    async with opened(own_redis.url) as caches:
        key, local = fresh_key(), fresh_key()
        assert await caches.tiers.put(local, ENTRY, refresh=False)
        own_redis.stop()
        with pytest.raises(UnavailableError):
            await caches.control.prewarm(key)
        assert await caches.control.prewarm(local), "the rows are here"


async def test_rows_over_the_capacity_of_this_process_are_not_prewarmed(own_redis: EmbeddedRedis) -> None:
    async with opened(own_redis.url, capacity_bytes=10) as caches:
        key = fresh_key()
        assert await caches.tiers.put(key, ENTRY, refresh=False)
        assert not await caches.control.prewarm(key)
