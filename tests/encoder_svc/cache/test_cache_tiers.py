"""A local copy is written back to the shared cache only while no operator has removed its image."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from encoder_svc.cache.cache_admin import CacheAdmin
from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.metrics import EncoderMetrics
from lookonce.forgotten import Forgotten
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.forget_channel import token_in
from tests.lookonce.store.entries import SMALL, fresh_key, make_rows

ENTRY = LocalEmbedding(SMALL, memoryview(make_rows(SMALL)).toreadonly(), 1.0)


@pytest.fixture
def admin(shared_redis: EmbeddedRedis) -> Iterator[CacheAdmin]:
    with contextlib.closing(CacheAdmin(shared_redis.url)) as admin:
        yield admin


@dataclass(slots=True)
class Watch:
    """A subscription to removals; tests set the token it heard last."""

    last_token: bytes | None = None

    @property
    def heard_token(self) -> bytes | None:
        return self.last_token

    def has_heard(self, token: bytes) -> bool:
        return False

    def removed_since(self, token: bytes, key: bytes, file_tags: Sequence[bytes]) -> bool:
        return token != self.last_token


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
async def tiers(shared_redis: EmbeddedRedis, watch: Watch) -> AsyncIterator[CacheTiers]:
    store = EmbeddingStore(shared_redis.url, 5.0, 60, 1 << 20)
    metrics = EncoderMetrics(CollectorRegistry())
    tiers = CacheTiers(LocalCache(1 << 20), store, metrics, num_threads=1, forget_watch=watch)
    yield tiers
    tiers.close()
    store.close()


def heard_of(tiers: CacheTiers) -> bytes:
    """The token that a working subscription would have heard last."""
    assert tiers.store is not None
    token = token_in(tiers.store)
    assert token is not None
    return token


async def test_a_copy_goes_back_where_it_went_away(tiers: CacheTiers, watch: Watch, admin: CacheAdmin) -> None:
    key = fresh_key()
    assert await tiers.put(key, ENTRY, refresh=False)
    for word in (None, Forgotten.of([fresh_key()])):
        if word is not None:
            admin.tell_to_forget(word)
        watch.last_token = heard_of(tiers)
        assert sum(admin.evict([key])) == 1
        assert await tiers.keep_stored(key, ENTRY)
        assert await tiers.find_shared(key) == SMALL


async def test_not_while_a_word_may_have_been_missed(tiers: CacheTiers, watch: Watch, admin: CacheAdmin) -> None:
    key = fresh_key()
    assert await tiers.put(key, ENTRY, refresh=False)
    watch.last_token = None
    assert sum(admin.evict([key])) == 1
    assert not await tiers.keep_stored(key, ENTRY)
    assert await tiers.find_shared(key) is None


async def test_not_where_a_word_was_missed_without_anybody_knowing(
    tiers: CacheTiers, watch: Watch, admin: CacheAdmin
) -> None:
    """The subscription is dead without a sign: the last token it heard is not the last that was published."""
    key = fresh_key()
    assert await tiers.put(key, ENTRY, refresh=False)
    watch.last_token = heard_of(tiers)
    admin.tell_to_forget(Forgotten.of([key]))
    assert sum(admin.evict([key])) == 1
    assert not await tiers.keep_stored(key, ENTRY)
    assert await tiers.find_shared(key) is None


async def test_not_when_the_word_comes_while_the_write_waits_for_a_thread(
    tiers: CacheTiers, watch: Watch, admin: CacheAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = fresh_key()
    assert await tiers.put(key, ENTRY, refresh=False)
    heard = watch.last_token = heard_of(tiers)
    assert sum(admin.evict([key])) == 1

    def forgotten_meanwhile(_store: EmbeddingStore) -> bytes:
        tiers.forget(Forgotten.of([key]))
        return heard

    monkeypatch.setattr("encoder_svc.cache.cache_tiers.token_in", forgotten_meanwhile)
    assert not await tiers.keep_stored(key, ENTRY)
    assert await tiers.find_shared(key) is None
