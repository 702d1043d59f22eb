"""What operators do to the shared cache, on one server, behind Sentinels and on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from lookonce.cache_admin import CacheAdmin
from lookonce.cache_names import pattern_of_fingerprint, pattern_of_tenant
from lookonce.content_key import ContentKey, EncoderFingerprint, ProcessorOptions, Tenant, content_key, image_digest
from lookonce.embedding_store import EmbeddingStore
from lookonce.errors import UnavailableError
from lookonce.forget_channel import ForgetListener
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.redis_server import EmbeddedRedis
from tests.lookonce.entries import SMALL, fresh_key, make_rows
from tests.lookonce.faults import kill_child
from tests.lookonce.redis_fleet import ClusterFleet, SentinelFleet

ROWS = make_rows(SMALL)
TIMEOUT_S = 20.0
NEVER_MS = 60_000
ENCODER, OTHER_ENCODER = EncoderFingerprint("a" * 64), EncoderFingerprint("b" * 64)
ACME, OTHER_TENANT = Tenant("acme", b"secret of acme"), Tenant("other", b"secret of the other")


@pytest.fixture(scope="module", params=["single", "sentinel", "cluster"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a running server, or of several."""
    if request.param == "single":
        with EmbeddedRedis(64 << 20) as server:
            yield server.url
        return
    fleet: SentinelFleet | ClusterFleet = (
        SentinelFleet(down_after_ms=NEVER_MS) if request.param == "sentinel" else ClusterFleet(node_timeout_ms=NEVER_MS)
    )
    try:
        fleet.start()
        yield fleet.url
    finally:
        fleet.stop()


@pytest.fixture
def admin(url: str) -> Iterator[CacheAdmin]:
    """An operator."""
    with contextlib.closing(CacheAdmin(url)) as admin:
        yield admin


@pytest.fixture
def store(url: str) -> Iterator[EmbeddingStore]:
    """A writer."""
    with contextlib.closing(EmbeddingStore(url, 5.0, 60, 1 << 20)) as store:
        yield store


def keys_of(fingerprint: EncoderFingerprint, tenant: Tenant) -> list[ContentKey]:
    return [content_key(image_digest(b"%d" % number), fingerprint, ProcessorOptions(), tenant) for number in range(8)]


def test_a_pinned_entry_has_no_end_until_it_is_unpinned(admin: CacheAdmin, store: EmbeddingStore) -> None:
    key, absent = fresh_key(), fresh_key()
    assert store.write(key, SMALL, memoryview(ROWS))
    entry, nothing = admin.describe([key, absent])
    assert nothing is None
    assert entry is not None
    assert entry.num_bytes == 4096 + SMALL.size_bytes
    assert entry.ttl_s is not None
    assert 0 < entry.ttl_s <= 60
    assert admin.pin([key, absent]) == [True, False]
    assert store.touch(key), "a pinned entry is there"
    pinned = admin.describe([key])[0]
    assert pinned is not None
    assert pinned.ttl_s is None
    assert admin.unpin([key, absent], 30) == [True, False]
    again = admin.describe([key])[0]
    assert again is not None
    assert again.ttl_s is not None
    assert 0 < again.ttl_s <= 30


def test_only_what_is_named_is_removed(admin: CacheAdmin, store: EmbeddingStore) -> None:
    groups = [keys_of(encoder, tenant) for encoder in (ENCODER, OTHER_ENCODER) for tenant in (ACME, OTHER_TENANT)]
    for group in groups:
        for key in group:
            assert store.write(key, SMALL, memoryview(ROWS))

    def numbers_left() -> list[int]:
        return [sum(store.stat(key) is not None for key in group) for group in groups]

    assert admin.totals(pattern_of_fingerprint(ENCODER)).num_entries == 16
    assert admin.evict(groups[0][:3]) == 3
    assert admin.evict(groups[0][:3]) == 0
    assert numbers_left() == [5, 8, 8, 8]
    assert admin.evict_matching(pattern_of_tenant(ACME)) == 13
    assert numbers_left() == [0, 8, 0, 8]
    assert admin.evict_matching(pattern_of_fingerprint(OTHER_ENCODER)) == 8
    assert numbers_left() == [0, 8, 0, 0]
    assert all(store.metadata(key) is None for key in groups[0]), "descriptions go, too"
    totals = admin.totals(pattern_of_tenant(OTHER_TENANT))
    assert totals.num_entries == 8
    assert totals.used_bytes > 0


@contextlib.asynccontextmanager
async def listening(url: str) -> AsyncIterator[tuple[ForgetListener, asyncio.Queue[Forgotten]]]:
    heard: asyncio.Queue[Forgotten] = asyncio.Queue()
    listener = ForgetListener(url, 1.0, heard.put_nowait)
    listener.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await listener.wait_until_listening()
            yield listener, heard
    finally:
        await listener.close()


async def test_everybody_hears_what_is_to_be_forgotten(url: str, admin: CacheAdmin) -> None:
    some = Forgotten.of([fresh_key(), fresh_key()])
    async with listening(url) as (_, first), listening(url) as (_, second):
        for forgotten in (some, EVERYTHING):
            await asyncio.to_thread(admin.tell_to_forget, forgotten)
            assert await first.get() == forgotten
            assert await second.get() == forgotten
        assert first.empty()


async def test_who_was_cut_off_forgets_everything_when_something_was_said_and_nothing_else() -> None:
    with EmbeddedRedis(64 << 20) as server, contextlib.closing(CacheAdmin(server.url)) as admin:
        async with listening(server.url) as (listener, heard):
            for was_said in (False, True):
                admin._client.client_kill_filter(_type="pubsub")
                listener._is_listening.clear()
                if was_said:
                    await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
                await listener.wait_until_listening()
                assert heard.qsize() == was_said
            assert heard.get_nowait() == EVERYTHING


def test_an_operator_is_told_when_redis_is_away_and_goes_on_when_it_is_back() -> None:
    with EmbeddedRedis(64 << 20) as server, contextlib.closing(CacheAdmin(server.url)) as admin:
        assert admin.evict([fresh_key()]) == 0
        kill_child(server.pid)
        for act in (
            lambda: admin.evict([fresh_key()]),
            lambda: admin.evict_matching(b"lookonce:*"),
            lambda: admin.pin([fresh_key()]),
            lambda: admin.describe([fresh_key()]),
            lambda: admin.tell_to_forget(EVERYTHING),
        ):
            with pytest.raises(UnavailableError):
                act()
        server.start()
        assert admin.evict([fresh_key()]) == 0
