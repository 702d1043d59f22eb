"""What operators do to the shared cache, on one server, behind Sentinels and on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from encoder_svc.cache.cache_admin import CacheAdmin
from lookonce.content_key import ContentKey, EncoderFingerprint, ProcessorOptions, Tenant, content_key, image_digest
from lookonce.errors import UnavailableError
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import pattern_of_fingerprint, pattern_of_tenant
from lookonce.store.embedding_store import EmbeddingStore, WriteOutcome
from lookonce.store.forget_channel import ForgetListener
from tests.lookonce.store.entries import SMALL, fresh_key, make_rows, read
from tests.lookonce.store.faults import kill_child
from tests.lookonce.store.redis.redis_fleet import ClusterFleet, SentinelFleet

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
async def listening(url: str, check_s: float = 60.0) -> AsyncIterator[tuple[ForgetListener, asyncio.Queue[Forgotten]]]:
    heard: asyncio.Queue[Forgotten] = asyncio.Queue()
    listener = ForgetListener(url, 1.0, heard.put_nowait, check_s=check_s)
    listener.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield listener, heard
    finally:
        await listener.close()


async def test_everybody_hears_what_is_to_be_forgotten(url: str, admin: CacheAdmin) -> None:
    some = Forgotten.of([fresh_key(), fresh_key()])
    await asyncio.to_thread(admin.tell_to_forget, some)
    async with listening(url) as (one, first), listening(url) as (other, second):
        for listener, heard in ((one, first), (other, second)):
            await listener.wait_until_listening()
            assert heard.get_nowait() == EVERYTHING, "what was said before they came is not known to them"
        for forgotten in (some, EVERYTHING):
            await asyncio.to_thread(admin.tell_to_forget, forgotten)
            assert await first.get() == forgotten
            assert await second.get() == forgotten
        assert first.empty()


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """One that the test may break."""
    with EmbeddedRedis(64 << 20) as server:
        yield server


async def reconnected(listener: ForgetListener) -> None:
    """Waits for the end of a lost subscription and for the next one."""
    while listener.is_listening:
        await asyncio.sleep(0.01)
    await listener.wait_until_listening()


async def test_who_was_cut_off_forgets_everything_if_something_was_said_meanwhile(server: EmbeddedRedis) -> None:
    with contextlib.closing(CacheAdmin(server.url)) as admin:
        async with listening(server.url) as (listener, heard):
            await listener.wait_until_listening()
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
            await heard.get()
            admin._client.client_kill_filter(_type="pubsub")
            await reconnected(listener)
            assert heard.empty(), "nothing was said while it was away"
            # As if a message had been sent that did not reach it.
            admin._client.set("lookonce:forgets", "another token")
            admin._client.client_kill_filter(_type="pubsub")
            await reconnected(listener)
            assert heard.get_nowait() == EVERYTHING


async def test_a_subscription_that_is_dead_without_saying_so_is_found_out(server: EmbeddedRedis) -> None:
    with contextlib.closing(CacheAdmin(server.url)) as admin:
        async with listening(server.url, check_s=0.1) as (listener, heard):
            await listener.wait_until_listening()
            admin._client.set("lookonce:forgets", "a token whose message never came")
            assert await heard.get() == EVERYTHING


async def test_a_restart_of_redis_does_not_hide_what_was_said_around_it(server: EmbeddedRedis) -> None:
    with contextlib.closing(CacheAdmin(server.url)) as admin:
        async with listening(server.url) as (listener, heard):
            await listener.wait_until_listening()
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
            await heard.get()
            kill_child(server.pid)
            server.start()
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
            assert await heard.get() == EVERYTHING


async def test_what_was_said_before_the_first_connection_is_found_out(server: EmbeddedRedis) -> None:
    kill_child(server.pid)
    async with listening(server.url) as (listener, heard):
        await asyncio.sleep(0.1)
        assert not listener.is_listening
        server.start()
        with contextlib.closing(CacheAdmin(server.url)) as admin:
            await asyncio.to_thread(admin.tell_to_forget, Forgotten.of([fresh_key()]))
        assert await heard.get() == EVERYTHING


def test_an_overwritten_entry_stays_pinned(url: str, admin: CacheAdmin, store: EmbeddingStore) -> None:
    key = fresh_key()
    assert store.write(key, SMALL, memoryview(ROWS))
    admin.pin([key])
    other_rows = make_rows(SMALL, seed=1)
    assert store.try_write(key, SMALL, memoryview(other_rows)) is WriteOutcome.EXISTS
    assert store.try_write(key, SMALL, memoryview(other_rows), overwrite=True) is WriteOutcome.STORED
    assert read(store, key, SMALL, 0, SMALL.num_rows) == other_rows
    entry = admin.describe([key])[0]
    assert entry is not None
    assert entry.ttl_s is None
    assert store.metadata(key) == SMALL
    unpinned = fresh_key()
    for overwrite in (False, True):
        assert store.write(unpinned, SMALL, memoryview(ROWS), overwrite=overwrite)
        entry = admin.describe([unpinned])[0]
        assert entry is not None
        assert entry.ttl_s is not None


def test_an_entry_stays_where_another_cannot_be_put_in_its_place(
    url: str, admin: CacheAdmin, store: EmbeddingStore
) -> None:
    key = fresh_key()
    assert store.write(key, SMALL, memoryview(ROWS))
    admin.pin([key])
    with contextlib.closing(EmbeddingStore(url, 1.0, 60, max_entry_bytes=10)) as narrow:
        other_rows = make_rows(SMALL, seed=1)
        assert narrow.try_write(key, SMALL, memoryview(other_rows), overwrite=True) is WriteOutcome.FAILED
    assert read(store, key, SMALL, 0, SMALL.num_rows) == ROWS
    entry = admin.describe([key])[0]
    assert entry is not None
    assert entry.ttl_s is None


def test_a_closed_operator_stops_in_the_middle_and_does_not_open_again(server: EmbeddedRedis) -> None:
    admin = CacheAdmin(server.url)
    assert admin.evict([fresh_key()]) == 0
    admin.close()
    with pytest.raises(UnavailableError):
        admin.evict([fresh_key()])


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
