"""The shared cache on a cluster: each image is on its node, moved slots are followed, a lost node costs its images."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import trustme
from redis.crc import key_slot

from encoder_svc.cache.cache_admin import CacheAdmin
from encoder_svc.cache.done_channel import DoneChannel
from encoder_svc.cache.encode_lease import EncodeLeases, LeaseState
from lookonce.content_key import ContentKey
from lookonce.store.cache_names import pattern_of_fingerprint
from lookonce.store.embedding_store import EmbeddingStore, WriteOutcome
from lookonce.store.redis.circuit_breaker import BreakerState, CircuitBreaker
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.server.certificates import Files
from tests.lookonce.store.entries import (
    LARGE,
    SMALL,
    data_key,
    fresh_key,
    make_rows,
    metadata_key,
    read,
    read_all,
    remove,
    write,
)
from tests.lookonce.store.faults import FaultProxy
from tests.lookonce.store.redis import redis_fleet
from tests.lookonce.store.redis.redis_fleet import NUM_SLOTS, PASSWORD, ClusterFleet, RedisProcess, node_id, until

MakeStore = Callable[..., EmbeddingStore]
Entries = dict[ContentKey, bytes]

ROWS = make_rows(LARGE)
# Limit that detects a hang. redis-py's defaults are ten seconds and several attempts.
HANG_S = 4.0


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[ClusterFleet]:
    """A cluster for tests that kill no node and leave the slots as they were. No node counts as down."""
    yield from running(ClusterFleet(node_timeout_ms=60_000))


@pytest.fixture
def cluster() -> Iterator[ClusterFleet]:
    """A cluster that the test may break."""
    yield from running(ClusterFleet())


def running(cluster: ClusterFleet) -> Iterator[ClusterFleet]:
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def key_at(cluster: ClusterFleet, index: int) -> ContentKey:
    """Returns a new key in a slot of this primary."""
    while True:
        key = fresh_key()
        if cluster.primary_of(data_key(key)) == index:
            return key


def read_small(store: EmbeddingStore, key: ContentKey) -> bytes | MissReason:
    return read(store, key, SMALL, 0, SMALL.num_rows)


def write_at(cluster: ClusterFleet, store: EmbeddingStore, index: int, number: int = 5) -> Entries:
    """Writes entries with different rows to this primary and returns them."""
    entries = {key_at(cluster, index): make_rows(SMALL, 100 * index + seed) for seed in range(number)}
    assert all(write(store, key, SMALL, memoryview(rows)) for key, rows in entries.items())
    return entries


def are_known(store: EmbeddingStore, *groups: Entries) -> list[bool]:
    """Returns whether the metadata of each group are known; asks for all groups at once."""
    keys = [key for entries in groups for key in entries]
    found = dict(zip(keys, store.metadata_of(keys), strict=True))
    assert set(found.values()) <= {SMALL, None}
    return [all(found[key] == SMALL for key in entries) for entries in groups]


def are_read(store: EmbeddingStore, entries: Entries) -> bool:
    """Returns whether all entries are read; checks that none is read wrongly."""
    found = {key: read_small(store, key) for key in entries}
    assert all(found[key] in (rows, *MissReason) for key, rows in entries.items())
    return found == entries


def num_looks(cluster: ClusterFleet) -> int:
    """Returns how often the nodes were asked for the table of slots."""
    calls = 0
    for node in (*cluster.primaries, cluster.replica):
        with node.admin() as client:
            calls += client.info("commandstats").get("cmdstat_cluster|slots", {}).get("calls", 0)
    return calls


def outcomes(store: EmbeddingStore) -> set[str]:
    return {outcome for _, outcome in store.stats.snapshot()}


# --- each image at its node -----------------------------------------------------------------------------------------


def test_images_lie_on_all_nodes_and_come_back_bit_equal(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    store = make_store(shared_cluster.url)
    assert store.ping()
    groups = [write_at(shared_cluster, store, index) for index in range(3)]
    assert are_known(store, *groups) == [True] * 3
    assert store.stats.snapshot()["metadata", "ok"] == sum(map(len, groups))
    for index, primary in enumerate(shared_cluster.primaries):
        entries = write_at(shared_cluster, store, index)
        for key, rows in entries.items():
            assert primary.ask("EXISTS", data_key(key)) == primary.ask("EXISTS", metadata_key(key)) == 1
            assert store.stat(key) == store.metadata(key) == SMALL
            assert read_small(store, key) == rows
            assert read(store, key, SMALL, 2, 5) == rows[2 * SMALL.row_bytes : 5 * SMALL.row_bytes]
        large = key_at(shared_cluster, index)
        assert write(store, large, LARGE, memoryview(ROWS))
        assert read_all(store, large) == ROWS
        assert store.touch(large)
        assert remove(store, large)
        assert read_all(store, large) is MissReason.ABSENT
        assert are_read(make_store(shared_cluster.url), entries)
    assert outcomes(store) == {"ok", "absent"}


def test_leases_are_on_the_node_of_their_image(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    mine, others = (EncodeLeases(make_store(shared_cluster.url), ttl_s=30.0) for _ in range(2))
    for index in range(3):
        key = key_at(shared_cluster, index)
        held = mine.acquire(key)
        assert held.state is LeaseState.HELD
        assert others.acquire(key).state is LeaseState.BUSY
        assert not others.renew(key, b"another's")
        assert mine.renew(key, held.token)
        assert mine.release(key, held.token, b"stored")
        assert others.acquire(key).state is LeaseState.HELD


def test_rows_are_stored_under_a_lease_on_every_node_until_it_is_revoked(
    shared_cluster: ClusterFleet, make_store: MakeStore
) -> None:
    store, rows = make_store(shared_cluster.url), memoryview(make_rows(SMALL))
    leases = EncodeLeases(store, ttl_s=30.0)
    keys = [key_at(shared_cluster, index) for index in range(3)]
    tokens = [leases.acquire(key, (bytes([index + 1]) * 32,)).token for index, key in enumerate(keys)]
    with contextlib.closing(CacheAdmin(shared_cluster.url)) as admin:
        # Those of the first file, by their tags, and then one by its name.
        admin.revoke_leases_in(pattern_of_fingerprint(keys[0].fingerprint), [bytes([1]) * 32])
        admin.revoke_leases(keys[1:2])
    outcomes = [store.try_write(key, SMALL, rows, lease_token=token) for key, token in zip(keys, tokens, strict=True)]
    assert outcomes == [WriteOutcome.LEASE_LOST, WriteOutcome.LEASE_LOST, WriteOutcome.STORED]


def test_concurrent_threads_find_the_nodes(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    store = make_store(shared_cluster.url)
    wrong: list[object] = []

    def work(seed: int) -> None:
        key, rows = fresh_key(), make_rows(SMALL, seed)
        found = read_small(store, key), write(store, key, SMALL, memoryview(rows)), read_small(store, key)
        if found != (MissReason.ABSENT, True, rows):
            wrong.append(found)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("number", range(3))
async def test_the_end_of_an_encode_is_received_on_every_node(
    shared_cluster: ClusterFleet, make_store: MakeStore, number: int
) -> None:
    leases = EncodeLeases(make_store(shared_cluster.url), ttl_s=30.0)
    channel = DoneChannel(shared_cluster.url, 0.5)
    channel.start()
    try:
        async with asyncio.timeout(20):
            while not channel.is_connected:
                await asyncio.sleep(0.02)
        key = key_at(shared_cluster, number)
        async with channel.listening(key) as listener:
            held = leases.acquire(key)
            assert await asyncio.to_thread(leases.release, key, held.token, b"stored")
            assert await listener.wait(HANG_S)
        assert listener.outcome == b"stored"
    finally:
        await channel.close()


def test_the_memory_limit_of_each_node_holds(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    small_one = shared_cluster.primaries[1]
    small_one.ask("CONFIG", "SET", "maxmemory", 4 * LARGE.size_bytes)
    try:
        store = make_store(shared_cluster.url)
        stored = [write(store, key_at(shared_cluster, index), LARGE, memoryview(ROWS)) for index in (0, 1, 2, 1, 0)]
        assert stored == [True, False, True, False, True]
        assert store.stats.snapshot()["write", "too_large"] == 2
    finally:
        small_one.ask("CONFIG", "SET", "maxmemory", 256 << 20)


def test_the_documented_access_rules_are_enough(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    commands = "getrange get hello strlen ping exists set pexpire unlink info cluster|slots".split()
    nodes = [*shared_cluster.primaries, shared_cluster.replica]
    for node in nodes:
        rules = ["resetchannels", "-@all", *(f"+{command}" for command in commands)]
        node.ask("ACL", "SETUSER", "writer", "on", ">pw", "~lookonce:*", *rules)
        node.ask("ACL", "LOG", "RESET")
    store = make_store(shared_cluster.url.replace(f":{PASSWORD}@", "writer:pw@"))
    assert all(are_read(store, write_at(shared_cluster, store, index)) for index in range(3))
    assert not any(node.ask("ACL", "LOG") for node in nodes)
    for node in nodes:
        node.ask("ACL", "SETUSER", "writer", "-cluster|slots")
    blind = make_store(shared_cluster.url.replace(f":{PASSWORD}@", "writer:pw@"))
    assert read_small(blind, fresh_key()) is MissReason.NOPERM
    assert not write(blind, fresh_key(), SMALL, memoryview(make_rows(SMALL, 0)))


def test_a_server_that_is_no_cluster_is_a_miss(make_store: MakeStore) -> None:
    server = RedisProcess(redis_fleet.data_settings())
    try:
        for is_up, reason in ((False, MissReason.CONNECT_FAILED), (True, MissReason.SERVER_ERROR)):
            if is_up:
                server.start()
            store = make_store(f"redis+cluster://:{PASSWORD}@{server.address}")
            assert read_small(store, fresh_key()) is reason
            assert not write(store, fresh_key(), SMALL, memoryview(make_rows(SMALL, 0)))
            assert not store.ping()
    finally:
        server.stop()


# --- slots that move ------------------------------------------------------------------------------------------------


def test_a_slot_that_moves_is_followed(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    store = make_store(shared_cluster.url)
    source, target = shared_cluster.primaries[1:]
    key, rows = key_at(shared_cluster, 1), make_rows(SMALL, 1)
    slot = key_slot(data_key(key).encode())
    assert write(store, key, SMALL, memoryview(rows))
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
    assert read_small(store, key) == rows
    move = ["MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS"]
    source.ask(*move, data_key(key), metadata_key(key))
    # Now the source replies ASK, which clients do not follow and which does not make the table outdated.
    looks = num_looks(shared_cluster)
    assert read_small(store, key) is MissReason.MOVED
    assert not write(store, key, SMALL, memoryview(rows))
    assert num_looks(shared_cluster) == looks
    for node in (target, source):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
    assert are_known(store, {key: rows}, write_at(shared_cluster, make_store(shared_cluster.url), 1)) == [True, True]
    assert read_small(store, key) == rows
    assert store.stat(key) == SMALL
    assert target.ask("EXISTS", data_key(key)) == 1
    assert store.stats.snapshot()["read_rows", "moved"] == 1
    leases = EncodeLeases(store, ttl_s=30.0)
    # The slot moves back without the rows: they are absent, and everything else is as before.
    target.ask("DEL", data_key(key), metadata_key(key))
    for node in (source, target):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", node_id(source))
    assert leases.acquire(key).state is LeaseState.HELD
    assert read_small(store, key) is MissReason.ABSENT
    assert write(store, key, SMALL, memoryview(rows))
    assert read_small(store, key) == rows
    assert store.stats.snapshot()["read_rows", "moved"] == 1


def test_an_unassigned_slot_is_a_miss_until_it_is_assigned(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    key, rows = key_at(shared_cluster, 2), make_rows(SMALL, 2)
    slot = key_slot(data_key(key).encode())
    owner = shared_cluster.primaries[2]
    store = make_store(shared_cluster.url, breaker=CircuitBreaker(failure_threshold=1))
    others = write_at(shared_cluster, store, 0)
    for node in shared_cluster.primaries:
        node.ask("CLUSTER", "DELSLOTS", slot)
    try:
        assert read_small(store, key) is MissReason.CLUSTER_DOWN
        assert read_small(make_store(shared_cluster.url), key) is MissReason.CLUSTER_DOWN
        assert are_read(store, others)
        assert are_known(store, {key: rows}, others) == [False, True]
    finally:
        owner.ask("CLUSTER", "ADDSLOTS", slot)
    until(lambda: write(store, key, SMALL, memoryview(rows)), "the slot is not found again")
    assert read_small(store, key) == rows
    assert store.state is BreakerState.CLOSED


def test_a_replica_as_a_single_server_is_a_miss(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    """The URL of a single server stands for that server, even if it is a node of a cluster."""
    entries = write_at(shared_cluster, make_store(shared_cluster.url), 0)
    key = next(iter(entries))
    store = make_store(shared_cluster.replica.url)
    assert read_small(store, key) is MissReason.MOVED
    assert write(store, key_at(shared_cluster, 0), SMALL, memoryview(make_rows(SMALL, 0))) is False
    assert are_read(make_store(f"redis+cluster://:{PASSWORD}@{shared_cluster.replica.address}"), entries)


# --- nodes that fail ------------------------------------------------------------------------------------------------


def test_a_killed_node_costs_its_images_and_no_others(cluster: ClusterFleet, make_store: MakeStore) -> None:
    store = make_store(cluster.url, breaker=CircuitBreaker(failure_threshold=1))
    entries = [write_at(cluster, store, index) for index in range(3)]
    cluster.primaries[1].kill()
    for _ in range(3):
        assert {read_small(store, key) for key in entries[1]} <= {MissReason.CLUSTER_DOWN}
        assert are_read(store, entries[0])
        assert are_read(store, entries[2])
        assert are_known(store, *entries) == [True, False, True]
        assert write(store, key_at(cluster, 0), SMALL, memoryview(make_rows(SMALL, 7)))
        assert not write(store, key_at(cluster, 1), SMALL, memoryview(make_rows(SMALL, 8)))
    assert store.state is BreakerState.CLOSED
    cluster.primaries[1].start()
    until(
        lambda: write(store, next(iter(entries[1])), SMALL, memoryview(make_rows(SMALL, 100))),
        "the node is not used again",
    )
    assert read_small(store, next(iter(entries[1]))) == make_rows(SMALL, 100)


def test_after_a_failover_the_replica_is_used_and_missing_entries_are_misses(
    cluster: ClusterFleet, make_store: MakeStore
) -> None:
    store = make_store(cluster.url)
    kept, others = write_at(cluster, store, 0), write_at(cluster, store, 2)
    until(lambda: cluster.replica.ask("DBSIZE") == cluster.primaries[0].ask("DBSIZE"), "the rows are not replicated")
    cluster.replica.ask("CONFIG", "SET", "masterauth", "wrong")
    cluster.primaries[0].ask("CLIENT", "KILL", "TYPE", "replica")
    lost = {key_at(cluster, 0): make_rows(SMALL, 50 + seed) for seed in range(5)}
    assert all(write(store, key, SMALL, memoryview(rows)) for key, rows in lost.items())
    assert are_read(store, lost)
    late = key_at(cluster, 0)
    cluster.primaries[0].kill()

    def is_back() -> bool:
        are_read(store, {**kept, **lost})
        assert are_read(store, others)
        return write(store, late, SMALL, memoryview(make_rows(SMALL, 9)))

    until(is_back, "no replica took over")
    assert are_read(store, {**kept, late: make_rows(SMALL, 9)})
    assert {read_small(store, key) for key in lost} == {MissReason.ABSENT}
    assert are_read(make_store(cluster.url), kept)


def test_a_frozen_node_delays_reads_of_its_images_only(shared_cluster: ClusterFleet, make_store: MakeStore) -> None:
    store = make_store(shared_cluster.url, budget_s=0.25)
    entries = [write_at(shared_cluster, store, index) for index in range(3)]
    with shared_cluster.primaries[1].frozen():
        for _ in range(3):
            for key in entries[1]:
                started_s = time.monotonic()
                assert isinstance(read_small(store, key), MissReason)
                assert time.monotonic() - started_s < HANG_S
            assert are_read(store, entries[2])
        # The node's own breaker is open, so that no operation waits for it any more.
        assert store.stats.snapshot()["read_rows", "cluster_down"] > 0
        # A new store has not yet learnt which node does not reply.
        assert are_read(make_store(shared_cluster.url), entries[0])
    assert store.state is BreakerState.CLOSED
    until(lambda: are_read(store, entries[1]), "the node is not used again")


def test_when_no_node_answers_the_breaker_opens_and_when_they_do_it_closes(
    shared_cluster: ClusterFleet, make_store: MakeStore
) -> None:
    store = make_store(shared_cluster.url, budget_s=0.25, breaker=CircuitBreaker(max_backoff_s=0.5))
    entries = write_at(shared_cluster, store, 0)

    def opens() -> bool:
        started_s = time.monotonic()
        assert isinstance(read_small(store, fresh_key()), MissReason)
        assert time.monotonic() - started_s < HANG_S
        return store.state is BreakerState.OPEN

    with contextlib.ExitStack() as stack:
        for node in (*shared_cluster.primaries, shared_cluster.replica):
            stack.enter_context(node.frozen())
        until(opens, "a cluster that is away is asked again and again")
    until(lambda: are_read(store, entries), "the cluster is not used again")
    assert store.state is BreakerState.CLOSED


# --- TLS ------------------------------------------------------------------------------------------------------------


def test_rows_travel_over_tls(make_store: MakeStore, tmp_path: pathlib.Path) -> None:
    authority, files = trustme.CA(), Files(tmp_path)
    files.issue(authority)
    context = files.server_context(asks_for_certificates=False)
    server = RedisProcess([*redis_fleet.data_settings(), "cluster-enabled yes", f"unixsocket {tmp_path}/server.sock"])
    proxy = FaultProxy(f"{tmp_path}/server.sock", context)
    try:
        server.start()
        # Makes the node announce its TLS port to clients.
        tls_port = proxy.url.rpartition(":")[2]
        server.ask("CONFIG", "SET", "cluster-announce-port", tls_port)
        server.ask("CLUSTER", "ADDSLOTS", *range(NUM_SLOTS))
        until(lambda: server.ask("CLUSTER INFO")["cluster_state"] == "ok", "the cluster does not come up")
        url = f"rediss+cluster://:{PASSWORD}@127.0.0.1:{tls_port}"
        store, key = make_store(f"{url}?ssl_ca_certs={files.authority}"), fresh_key()
        assert write(store, key, LARGE, memoryview(ROWS))
        assert read_all(store, key) == ROWS
        assert make_store(url).stat(key) is None, "a certificate of an unknown issuer must not be trusted"
    finally:
        proxy.close()
        server.stop()
