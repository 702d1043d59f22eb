"""The shared cache under Sentinels: the primary is found, lost and found again, and rows are never wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from encoder_svc.cache.done_channel import DoneChannel
from encoder_svc.cache.encode_lease import EncodeLeases, LeaseState
from lookonce.content_key import ContentKey
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.circuit_breaker import BreakerState, CircuitBreaker
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.store.entries import LARGE, data_key, fresh_key, make_rows, read_all, remove, write
from tests.lookonce.store.redis.redis_fleet import PASSWORD, SERVICE, RedisProcess, SentinelFleet, until

MakeStore = Callable[..., EmbeddingStore]

ROWS = make_rows(LARGE)
# Limit that detects a hang. redis-py's defaults are ten seconds and several attempts.
HANG_S = 4.0
SENTINEL_PASSWORD = "watched"
# No server is silent for this long, so that the Sentinels never count one as down.
NEVER_MS = 3_600_000


@pytest.fixture(scope="module")
def shared_fleet() -> Iterator[SentinelFleet]:
    """A group for tests that neither kill nor demote a server. Its Sentinels require a password."""
    settings = [f"requirepass {SENTINEL_PASSWORD}"]
    yield from running(SentinelFleet(settings, SENTINEL_PASSWORD, down_after_ms=NEVER_MS))


@pytest.fixture
def fleet() -> Iterator[SentinelFleet]:
    """A group that the test may break."""
    yield from running(SentinelFleet())


@pytest.fixture
def obedient_fleet() -> Iterator[SentinelFleet]:
    """A group whose primary changes only when the test says so."""
    yield from running(SentinelFleet(down_after_ms=NEVER_MS))


def running(fleet: SentinelFleet) -> Iterator[SentinelFleet]:
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


def url_of(fleet: SentinelFleet, *sentinels: RedisProcess) -> str:
    """Returns the URL of `shared_fleet` that names these Sentinels, or all of them."""
    return f"{fleet.url_by(sentinels or fleet.sentinels)}?sentinel_password={SENTINEL_PASSWORD}"


def patient_breaker() -> CircuitBreaker:
    """Returns a breaker that never opens, for tests of single operations."""
    return CircuitBreaker(failure_threshold=1_000_000)


def rows_of(seed: int) -> bytes:
    return make_rows(LARGE, seed)


def write_some(store: EmbeddingStore, number: int) -> dict[ContentKey, bytes]:
    entries = {fresh_key(): rows_of(seed) for seed in range(number)}
    assert all(write(store, key, LARGE, memoryview(rows)) for key, rows in entries.items())
    return entries


def forget_on(replica: RedisProcess, keys: list[ContentKey]) -> None:
    """Removes entries from the replica, as if they had not been replicated."""
    replica.ask("CONFIG", "SET", "replica-read-only", "no")
    assert replica.ask("DEL", *map(data_key, keys)) == len(keys)


def is_replicated(replica: RedisProcess, keys: Any) -> bool:
    return bool(replica.ask("EXISTS", *map(data_key, keys)) == len(keys))


def is_primary(process: RedisProcess) -> bool:
    return bool(process.ask("ROLE")[0] == b"master")


# --- finding the primary --------------------------------------------------------------------------------------------


def test_everything_works_at_the_primary_that_sentinels_name(
    shared_fleet: SentinelFleet, make_store: MakeStore
) -> None:
    store, key = make_store(url_of(shared_fleet)), fresh_key()
    assert store.ping()
    assert store.stat(key) is None
    assert read_all(store, key) is MissReason.ABSENT
    assert write(store, key, LARGE, memoryview(ROWS))
    assert store.stat(key) == store.metadata(key) == LARGE
    assert read_all(store, key) == ROWS
    assert store.touch(key)
    leases = EncodeLeases(store, ttl_s=30.0)
    held = leases.acquire(key)
    assert (held.state, leases.acquire(key).state) == (LeaseState.HELD, LeaseState.BUSY)
    assert leases.renew(key, held.token)
    assert leases.release(key, held.token, b"stored")
    assert remove(store, key)
    assert store.stat(key) is None
    outcomes = {outcome for _, outcome in store.stats.snapshot()}
    assert outcomes == {"ok", "absent"}


def test_the_memory_limit_of_the_primary_holds(shared_fleet: SentinelFleet, make_store: MakeStore) -> None:
    limit_bytes = 4 * LARGE.size_bytes
    shared_fleet.primary.ask("CONFIG", "SET", "maxmemory", limit_bytes)
    try:
        store = make_store(url_of(shared_fleet))
        assert not write(store, fresh_key(), LARGE, memoryview(ROWS))
        assert store.stats.snapshot()["write", "too_large"] == 1
    finally:
        shared_fleet.primary.ask("CONFIG", "SET", "maxmemory", 256 << 20)


def test_the_documented_access_rules_are_enough(shared_fleet: SentinelFleet, make_store: MakeStore) -> None:
    for sentinel in shared_fleet.sentinels:
        sentinel.ask(
            "ACL", "SETUSER", "watcher", "on", ">pw", "resetchannels", "-@all", "+sentinel|get-master-addr-by-name"
        )
    url = f"{shared_fleet.url}?sentinel_username=watcher&sentinel_password=pw"
    store, key = make_store(url), fresh_key()
    assert write(store, key, LARGE, memoryview(ROWS))
    assert read_all(store, key) == ROWS
    for sentinel in shared_fleet.sentinels:
        assert not sentinel.ask("ACL", "LOG")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("?sentinel_password=", "?sentinel_password=not"), MissReason.AUTH),
        ((f":{PASSWORD}@", ":wrong@"), MissReason.AUTH),
        ((f"/{SERVICE}", "/other"), MissReason.CONNECT_FAILED),
    ],
    ids=["the Sentinels' password", "the primary's password", "the service"],
)
def test_a_wrong_password_or_service_is_a_miss(
    shared_fleet: SentinelFleet, make_store: MakeStore, change: tuple[str, str], reason: MissReason
) -> None:
    store = make_store(url_of(shared_fleet).replace(*change))
    assert read_all(store, fresh_key()) is reason
    assert not write(store, fresh_key(), LARGE, memoryview(ROWS))


def test_a_server_that_is_no_sentinel_is_a_miss(shared_fleet: SentinelFleet, make_store: MakeStore) -> None:
    store = make_store(f"redis+sentinel://:{PASSWORD}@{shared_fleet.primary.address}/{SERVICE}")
    assert isinstance(read_all(store, fresh_key()), MissReason)
    assert not store.ping()


def test_a_closed_store_only_misses(shared_fleet: SentinelFleet, make_store: MakeStore) -> None:
    store = make_store(url_of(shared_fleet))
    assert store.ping()
    store.close()
    assert read_all(store, fresh_key()) is MissReason.STORE_CLOSED


# --- Sentinels that do not answer -----------------------------------------------------------------------------------


def test_a_frozen_sentinel_is_passed_over(shared_fleet: SentinelFleet, make_store: MakeStore) -> None:
    with shared_fleet.sentinels[0].frozen():
        # The Sentinel that a client asks first is random.
        for _ in range(6):
            store, key = make_store(url_of(shared_fleet, *shared_fleet.sentinels[:2]), budget_s=1.0), fresh_key()
            started_s = time.monotonic()
            assert write(store, key, LARGE, memoryview(ROWS))
            assert time.monotonic() - started_s < HANG_S
            assert read_all(store, key) == ROWS


def test_without_sentinels_an_operation_costs_no_more_than_the_budget(
    shared_fleet: SentinelFleet, make_store: MakeStore
) -> None:
    nobody = RedisProcess([])
    with shared_fleet.sentinels[0].frozen():
        for sentinels in ((shared_fleet.sentinels[0],), (nobody,), (nobody, shared_fleet.sentinels[0])):
            store = make_store(url_of(shared_fleet, *sentinels), budget_s=0.25, breaker=patient_breaker())
            for _ in range(3):
                started_s = time.monotonic()
                assert not store.ping()
                assert time.monotonic() - started_s < HANG_S
            assert {reason for _, reason in store.stats.snapshot()} <= {"timeout", "connect_failed"}
    nobody.stop()


def test_without_sentinels_the_known_primary_stays_in_use(shared_fleet: SentinelFleet, make_store: MakeStore) -> None:
    sentinel = shared_fleet.sentinels[0]
    store, key = make_store(url_of(shared_fleet, sentinel), budget_s=1.0), fresh_key()
    assert write(store, key, LARGE, memoryview(ROWS))
    with sentinel.frozen():
        with shared_fleet.primary.frozen():
            assert not store.ping()
        for _ in range(3):
            assert read_all(store, key) == ROWS


# --- failover -------------------------------------------------------------------------------------------------------


def test_after_a_failover_the_new_primary_is_used_and_missing_entries_are_misses(
    fleet: SentinelFleet, make_store: MakeStore
) -> None:
    store = make_store(fleet.url, breaker=CircuitBreaker(max_backoff_s=0.5))
    entries = write_some(store, 6)
    until(lambda: is_replicated(fleet.replica, entries), "the rows are not replicated")
    lost = list(entries)[::2]
    forget_on(fleet.replica, lost)
    fleet.primary.kill()
    late = fresh_key()

    def is_back() -> bool:
        for key, rows in entries.items():
            assert read_all(store, key) in (rows, *MissReason)
        return write(store, late, LARGE, memoryview(ROWS))

    until(is_back, "no new primary was found")
    assert read_all(store, late) == ROWS
    for key, rows in entries.items():
        assert read_all(store, key) == (MissReason.ABSENT if key in lost else rows)
    assert store.state is BreakerState.CLOSED
    assert EncodeLeases(store, ttl_s=30.0).acquire(late).state is LeaseState.HELD
    for key in lost:
        assert write(store, key, LARGE, memoryview(entries[key]))
        assert read_all(store, key) == entries[key]
    # A new store has never seen the old primary.
    assert read_all(make_store(fleet.url), late) == ROWS


def test_a_demoted_primary_refuses_writes_and_the_new_one_is_found_within_the_operation(
    obedient_fleet: SentinelFleet, make_store: MakeStore
) -> None:
    fleet = obedient_fleet
    store = make_store(fleet.url)
    entries = write_some(store, 3)
    until(lambda: is_replicated(fleet.replica, entries), "the rows are not replicated")
    fleet.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
    until(lambda: is_primary(fleet.replica) and not is_primary(fleet.primary), "nobody was promoted")
    until(lambda: all(fleet.replica.port == named_port(one) for one in fleet.sentinels), "not all Sentinels know it")
    key = fresh_key()
    assert write(store, key, LARGE, memoryview(ROWS))
    assert {read_all(store, key): rows for key, rows in entries.items()} == {rows: rows for rows in entries.values()}
    assert fleet.replica.ask("EXISTS", data_key(key)) == 1
    assert store.stats.snapshot()["write", "ok"] == 4
    assert {outcome for _, outcome in store.stats.snapshot()} == {"ok"}


def named_port(sentinel: RedisProcess) -> int:
    with sentinel.admin() as client:
        return int(client.sentinel_masters()[SERVICE]["port"])


async def test_the_end_of_an_encode_is_received_after_a_failover(fleet: SentinelFleet, make_store: MakeStore) -> None:
    store, key = make_store(fleet.url), fresh_key()
    leases = EncodeLeases(store, ttl_s=30.0)
    channel = DoneChannel(fleet.url, 0.5)
    channel.start()
    try:
        await connected(channel)
        for outcome in (b"stored", b"failed"):
            async with channel.listening(key) as listener:
                held = leases.acquire(key)
                assert await asyncio.to_thread(leases.release, key, held.token, outcome)
                assert await listener.wait(HANG_S)
                assert listener.outcome == outcome
            if outcome == b"stored":
                fleet.primary.kill()
                await asyncio.to_thread(until, store.ping, "no new primary was found")
                await connected(channel)
    finally:
        await channel.close()


async def connected(channel: DoneChannel) -> None:
    async with asyncio.timeout(20):
        while not channel.is_connected:
            await asyncio.sleep(0.02)


# --- a replica ------------------------------------------------------------------------------------------------------


def test_a_replica_serves_reads_and_refuses_writes(shared_fleet: SentinelFleet, make_store: MakeStore) -> None:
    key, other = fresh_key(), fresh_key()
    assert write(make_store(url_of(shared_fleet)), key, LARGE, memoryview(ROWS))
    until(lambda: is_replicated(shared_fleet.replica, [key]), "the rows are not replicated")
    store = make_store(shared_fleet.replica.url)
    assert write(store, other, LARGE, memoryview(ROWS)) is False
    assert store.touch(key) is False
    assert EncodeLeases(store, ttl_s=30.0).acquire(other).state is LeaseState.UNAVAILABLE
    assert read_all(store, key) == ROWS
    assert read_all(store, other) is MissReason.ABSENT
    snapshot = store.stats.snapshot()
    assert [snapshot[operation, "readonly"] for operation in ("write", "touch", "lease")] == [1, 1, 1]
    assert store.state is BreakerState.CLOSED


def test_a_replica_that_refuses_stale_reads_is_a_miss(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore
) -> None:
    store, key = make_store(own_redis.url), fresh_key()
    assert write(store, key, LARGE, memoryview(ROWS))
    admin.config_set("replica-serve-stale-data", "no")
    admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert read_all(store, key) is MissReason.CLUSTER_DOWN
    assert write(store, fresh_key(), LARGE, memoryview(ROWS)) is False
    admin.execute_command("REPLICAOF", "NO", "ONE")
    assert read_all(store, key) == ROWS
