"""Operators' calls on the shared cache, with one server, under Sentinels and on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import Iterator

import pytest
import redis
from redis.crc import key_slot

from encoder_svc.cache.cache_admin import CacheAdmin
from lookonce.content_key import ContentKey, EncoderFingerprint, ProcessorOptions, Tenant, content_key, image_digest
from lookonce.errors import UnavailableError
from lookonce.forgotten import EVERYTHING, Forgotten
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import data_key, metadata_key, pattern_of_fingerprint, pattern_of_tenant
from lookonce.store.embedding_store import EmbeddingStore, WriteOutcome
from tests.lookonce.store.entries import SMALL, fresh_key, make_rows, read, write
from tests.lookonce.store.faults import kill_child
from tests.lookonce.store.forget_listening import listening
from tests.lookonce.store.redis.redis_fleet import (
    PASSWORD,
    SERVICE,
    ClusterFleet,
    RedisProcess,
    SentinelFleet,
    node_id,
    until,
)

USERS = pathlib.Path(__file__).parents[3] / "deploy/redis/users.acl"
ROWS = make_rows(SMALL)
TIMEOUT_S = 20.0
NEVER_MS = 60_000
ENCODER, OTHER_ENCODER = EncoderFingerprint("a" * 64), EncoderFingerprint("b" * 64)
ACME, OTHER_TENANT = Tenant("acme", b"secret of acme"), Tenant("other", b"secret of the other")


@pytest.fixture(scope="module", params=["single", "sentinel", "cluster"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a running server, of Sentinels or of a cluster."""
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
    """The operators' access to the cache."""
    with contextlib.closing(CacheAdmin(url)) as admin:
        yield admin


@pytest.fixture
def store(url: str) -> Iterator[EmbeddingStore]:
    """A store that writes entries."""
    with contextlib.closing(EmbeddingStore(url, 5.0, 60, 1 << 20)) as store:
        yield store


def keys_of(fingerprint: EncoderFingerprint, tenant: Tenant) -> list[ContentKey]:
    return [content_key(image_digest(b"%d" % number), fingerprint, ProcessorOptions(), tenant) for number in range(8)]


def test_a_pinned_entry_does_not_expire_until_it_is_unpinned(admin: CacheAdmin, store: EmbeddingStore) -> None:
    key, absent = fresh_key(), fresh_key()
    assert write(store, key, SMALL, memoryview(ROWS))
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


def test_only_the_selected_images_are_removed(admin: CacheAdmin, store: EmbeddingStore) -> None:
    groups = [keys_of(encoder, tenant) for encoder in (ENCODER, OTHER_ENCODER) for tenant in (ACME, OTHER_TENANT)]
    for group in groups:
        for key in group:
            assert write(store, key, SMALL, memoryview(ROWS))

    def numbers_left() -> list[int]:
        return [sum(store.stat(key) is not None for key in group) for group in groups]

    assert admin.totals(pattern_of_fingerprint(ENCODER)).num_entries == 16
    assert sum(admin.evict(groups[0][:3])) == 3
    assert sum(admin.evict(groups[0][:3])) == 0
    assert numbers_left() == [5, 8, 8, 8]
    assert admin.evict_matching(pattern_of_tenant(ACME)) == 13
    assert numbers_left() == [0, 8, 0, 8]
    assert admin.evict_matching(pattern_of_fingerprint(OTHER_ENCODER)) == 8
    assert numbers_left() == [0, 8, 0, 0]
    assert all(store.metadata(key) is None for key in groups[0]), "descriptions go, too"
    totals = admin.totals(pattern_of_tenant(OTHER_TENANT))
    assert totals.num_entries == 8
    assert totals.used_bytes > 0


async def test_every_listener_receives_the_images_to_forget(url: str, admin: CacheAdmin) -> None:
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
    """A server that the test may break."""
    with EmbeddedRedis(64 << 20) as server:
        yield server


def test_an_overwritten_entry_stays_pinned(url: str, admin: CacheAdmin, store: EmbeddingStore) -> None:
    key = fresh_key()
    assert write(store, key, SMALL, memoryview(ROWS))
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
        assert write(store, unpinned, SMALL, memoryview(ROWS), overwrite=overwrite)
        entry = admin.describe([unpinned])[0]
        assert entry is not None
        assert entry.ttl_s is not None


def test_an_entry_stays_when_its_replacement_is_refused(url: str, admin: CacheAdmin, store: EmbeddingStore) -> None:
    key = fresh_key()
    assert write(store, key, SMALL, memoryview(ROWS))
    admin.pin([key])
    with contextlib.closing(EmbeddingStore(url, 1.0, 60, max_entry_bytes=10)) as narrow:
        other_rows = make_rows(SMALL, seed=1)
        assert narrow.try_write(key, SMALL, memoryview(other_rows), overwrite=True) is WriteOutcome.FAILED
    assert read(store, key, SMALL, 0, SMALL.num_rows) == ROWS
    entry = admin.describe([key])[0]
    assert entry is not None
    assert entry.ttl_s is None


def test_closed_access_refuses_calls(server: EmbeddedRedis) -> None:
    admin = CacheAdmin(server.url)
    assert sum(admin.evict([fresh_key()])) == 0
    admin.close()
    with pytest.raises(UnavailableError):
        admin.evict([fresh_key()])


def test_calls_fail_while_redis_is_down_and_work_when_it_is_back() -> None:
    with EmbeddedRedis(64 << 20) as server, contextlib.closing(CacheAdmin(server.url)) as admin:
        assert sum(admin.evict([fresh_key()])) == 0
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
        assert sum(admin.evict([fresh_key()])) == 0


# --- names that move between servers ---------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[ClusterFleet]:
    """A cluster whose slots the test may move."""
    fleet = ClusterFleet(node_timeout_ms=NEVER_MS)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


def test_a_scan_of_many_batches_finds_every_image(server: EmbeddedRedis) -> None:
    num_images = 2000
    with contextlib.closing(CacheAdmin(server.url)) as admin, redis.Redis.from_url(server.url) as operator:
        operator.mset({f"lookonce:f:t:{{{number}}}:{kind}": b"x" for number in range(num_images) for kind in "em"})
        operator.set("another:e", b"x")
        assert admin.totals(b"lookonce:*").num_entries == num_images
        assert admin.evict_matching(b"lookonce:*") == num_images
        assert operator.keys() == [b"another:e"]


def test_an_operator_follows_a_failover_that_sentinels_decided() -> None:
    fleet = SentinelFleet(down_after_ms=NEVER_MS)
    try:
        fleet.start()
        with (
            contextlib.closing(CacheAdmin(fleet.url)) as admin,
            contextlib.closing(EmbeddingStore(fleet.url, 5.0, 60, 1 << 20)) as store,
        ):
            keys = keys_of(ENCODER, ACME)
            for key in keys:
                assert write(store, key, SMALL, memoryview(ROWS))
            assert admin.pin(keys[:1]) == [True]
            until(lambda: fleet.replica.ask("DBSIZE") == 2 * len(keys), "the replica lacks images")
            fleet.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
            until(lambda: all(named_port(one) == fleet.replica.port for one in fleet.sentinels), "nobody was promoted")
            until(lambda: role_of(fleet.primary) == "slave", "the old primary was not demoted")
            assert sum(admin.evict(keys[:1])) == 1
            assert admin.totals(b"lookonce:*").num_entries == len(keys) - 1
            assert admin.evict_matching(b"lookonce:*") == len(keys) - 1
            assert fleet.replica.ask("DBSIZE") == 0
    finally:
        fleet.stop()


def named_port(sentinel: RedisProcess) -> int:
    """Returns the port of the primary that this Sentinel names."""
    with sentinel.admin() as client:
        return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])


def role_of(server: RedisProcess) -> str:
    """Returns the server's role, "master" or "slave"."""
    with server.admin() as client:
        return str(client.info("replication")["role"])


def test_an_operator_follows_a_slot_that_moved_and_reports_one_that_is_moving(cluster: ClusterFleet) -> None:
    source, target = cluster.primaries[1:]
    with (
        contextlib.closing(CacheAdmin(cluster.url)) as admin,
        contextlib.closing(EmbeddingStore(cluster.url, 5.0, 60, 1 << 20)) as store,
    ):
        key = next(key for key in iter(fresh_key, None) if cluster.primary_of(data_key(key).decode()) == 1)
        slot = key_slot(data_key(key))
        assert write(store, key, SMALL, memoryview(ROWS))
        assert admin.pin([key]) == [True]
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
        move = ["MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS"]
        source.ask(*move, data_key(key), metadata_key(key))
        with pytest.raises(UnavailableError):
            admin.evict([key])
        with pytest.raises(UnavailableError):
            admin.evict_matching(b"lookonce:*")
        assert target.ask("DBSIZE") == 2, "nothing was removed"
        for node in (target, source):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
        assert admin.pin([key]) == [True]
        assert admin.evict_matching(b"lookonce:*") == 1
        assert target.ask("DBSIZE") == 0


def test_the_documented_access_rules_are_enough_in_a_cluster(cluster: ClusterFleet) -> None:
    (line,) = (line for line in USERS.read_text().splitlines() if line.startswith("user lookonce-janitor"))
    rules = [rule for rule in line.split()[3:] if not rule.startswith("#")]
    nodes = (*cluster.primaries, cluster.replica)
    for node in nodes:
        node.ask("ACL", "SETUSER", "janitor", "on", ">pw", *rules)
    with (
        contextlib.closing(CacheAdmin(cluster.url.replace(f":{PASSWORD}@", "janitor:pw@"))) as admin,
        contextlib.closing(EmbeddingStore(cluster.url, 5.0, 60, 1 << 20)) as store,
    ):
        keys = keys_of(ENCODER, ACME)
        for key in keys:
            assert write(store, key, SMALL, memoryview(ROWS))
        admin.tell_to_forget(EVERYTHING)
        assert admin.pin(keys) == [True] * len(keys)
        assert None not in admin.describe(keys)
        assert admin.unpin(keys, 60) == [True] * len(keys)
        assert sum(admin.evict(keys[:2])) == 2
        assert admin.totals(b"lookonce:*").num_entries == len(keys) - 2
        assert admin.evict_matching(b"lookonce:*") == len(keys) - 2
    for node in nodes:
        assert not node.ask("ACL", "LOG")
