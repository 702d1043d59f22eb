"""Every failure of Redis is a miss within the budget: a dead, frozen, slow, garbling, full or forbidding server."""

from __future__ import annotations

import os
import pathlib
import signal
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest
import trustme

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.codec import HEADER_BYTES
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.circuit_breaker import BreakerState, CircuitBreaker
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.server.certificates import Files
from tests.lookonce.store.entries import LARGE, data_key, fresh_key, make_entry, make_rows, read_all, remove, write
from tests.lookonce.store.faults import FaultProxy, kill_child

MakeStore = Callable[..., EmbeddingStore]

ROWS = make_rows(LARGE)
# Limit that detects a hang. redis-py alone would take ten seconds and more.
HANG_S = 4.0


def patient_breaker() -> CircuitBreaker:
    """Returns a breaker that never opens, for tests that provoke many failures."""
    return CircuitBreaker(failure_threshold=1_000_000)


def url_of_user(server: EmbeddedRedis, user: str, password: str) -> str:
    return server.url.replace("unix://", f"unix://{user}:{password}@")


class ManualClock:
    """A clock that advances only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def every_operation_fails_quietly(store: EmbeddingStore) -> None:
    key = fresh_key()
    assert store.stat(key) is None
    assert store.metadata(key) is None
    assert isinstance(read_all(store, key), MissReason)
    assert write(store, key, LARGE, memoryview(ROWS)) is False
    assert store.touch(key) is False
    assert store.ping() is False


# --- dead and frozen ------------------------------------------------------------------------------------------------


def test_without_a_server_every_operation_fails_quietly(make_store: MakeStore, tmp_path: pathlib.Path) -> None:
    for breaker in (patient_breaker(), CircuitBreaker()):
        every_operation_fails_quietly(make_store(f"unix://{tmp_path}/nobody.sock", breaker=breaker))


def test_the_breaker_opens_when_the_server_dies_and_closes_when_it_is_back(
    own_redis: EmbeddedRedis, make_store: MakeStore
) -> None:
    clock = ManualClock()
    store = make_store(own_redis.url, breaker=CircuitBreaker(clock=clock))
    key = fresh_key()
    assert write(store, key, LARGE, memoryview(ROWS))
    kill_child(own_redis.pid)
    every_operation_fails_quietly(store)
    states = [store.state]
    clock.now_s += 0.5
    assert not store.ping()
    states.append(store.state)
    own_redis.start()
    assert not store.ping()
    clock.now_s += 1.0
    assert store.ping()
    states.append(store.state)
    assert states == [BreakerState.OPEN, BreakerState.OPEN, BreakerState.CLOSED]
    assert store.stats.snapshot()["ping", "breaker_open"] == 2
    assert store.stat(key) is None
    assert write(store, key, LARGE, memoryview(ROWS))
    assert read_all(store, key) == ROWS


def test_an_idle_connection_survives_a_restart_of_the_server(own_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store = make_store(own_redis.url)
    assert store.ping()
    kill_child(own_redis.pid)
    own_redis.start()
    assert store.ping()


@pytest.mark.parametrize(
    "options", ["", "?socket_timeout=60&socket_connect_timeout=60&retry_on_timeout=yes&protocol=3"]
)
@pytest.mark.parametrize("use_tcp", [False, True])
def test_a_frozen_server_costs_no_more_than_the_budget(make_store: MakeStore, use_tcp: bool, options: str) -> None:
    with EmbeddedRedis(64 << 20, use_tcp=use_tcp) as server:
        store = make_store(server.url + options, budget_s=0.25, breaker=patient_breaker())
        assert store.ping()
        os.kill(server.pid, signal.SIGSTOP)
        for ask in (store.ping, lambda: write(store, fresh_key(), LARGE, memoryview(ROWS)), store.ping):
            started_s = time.monotonic()
            assert ask() is False
            assert time.monotonic() - started_s < HANG_S
        os.kill(server.pid, signal.SIGCONT)


def test_late_replies_of_a_thawed_server_are_discarded(own_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store = make_store(own_redis.url, budget_s=0.5, breaker=patient_breaker())
    key = fresh_key()
    write(store, key, LARGE, memoryview(ROWS))
    os.kill(own_redis.pid, signal.SIGSTOP)
    assert store.stat(fresh_key()) is None
    assert read_all(store, fresh_key()) is MissReason.TIMEOUT
    os.kill(own_redis.pid, signal.SIGCONT)
    for _ in range(3):
        assert store.stat(key) == LARGE
        assert read_all(store, key) == ROWS


# --- slow and garbled -----------------------------------------------------------------------------------------------


def test_a_trickling_reply_is_abandoned_without_opening_the_breaker(
    fault_proxy: FaultProxy, shared_redis: EmbeddedRedis, make_store: MakeStore
) -> None:
    key = fresh_key()
    assert write(make_store(shared_redis.url), key, LARGE, memoryview(ROWS))
    store = make_store(fault_proxy.url, budget_s=0.3, breaker=CircuitBreaker(failure_threshold=1))
    fault_proxy.faults.pause_s = 0.02
    started_s = time.monotonic()
    assert read_all(store, key) is MissReason.SLOW
    assert time.monotonic() - started_s < HANG_S
    assert store.state is BreakerState.CLOSED


@pytest.mark.parametrize("cut_after_bytes", [0, *(1 << power for power in range(23))])
def test_a_connection_cut_within_a_reply_is_a_miss_and_the_next_read_is_right(
    fault_proxy: FaultProxy, shared_redis: EmbeddedRedis, make_store: MakeStore, cut_after_bytes: int
) -> None:
    key = fresh_key()
    assert write(make_store(shared_redis.url), key, LARGE, memoryview(ROWS))
    store = make_store(fault_proxy.url)
    fault_proxy.faults.cut_after_bytes = cut_after_bytes
    assert read_all(store, key) is MissReason.CLOSED
    fault_proxy.faults.cut_after_bytes = None
    assert read_all(store, key) == ROWS


@pytest.mark.parametrize(
    "reply",
    [
        b"\r\n",
        b"hello\r\n",
        b"$-2\r\n",
        b"$abc\r\n",
        b"$99999999999999999999\r\n",
        b"$4097\r\n" + b"x" * 4099,
        b"$5\r\nhelloworld\r\n",
        b"*1\r\n$1\r\na\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"x" * 100_000,
    ],
)
def test_a_garbled_reply_is_a_protocol_miss_and_the_connection_is_closed(
    fault_proxy: FaultProxy, shared_redis: EmbeddedRedis, make_store: MakeStore, reply: bytes
) -> None:
    key = fresh_key()
    assert write(make_store(shared_redis.url), key, LARGE, memoryview(ROWS))
    store = make_store(fault_proxy.url)
    fault_proxy.faults.forged_reply = reply
    assert read_all(store, key) is MissReason.PROTOCOL
    fault_proxy.faults.forged_reply = None
    assert read_all(store, key) == ROWS


def test_a_reply_without_its_end_is_not_accepted(fault_proxy: FaultProxy, make_store: MakeStore) -> None:
    store, key = make_store(fault_proxy.url), fresh_key()
    header = make_entry(key, LARGE, ROWS)[:HEADER_BYTES]
    well_formed = b"$4096\r\n%b\r\n:%d\r\n" % (header, 4096 + len(ROWS))
    fault_proxy.faults.forged_reply = well_formed
    assert store.stat(key) == LARGE
    fault_proxy.faults.forged_reply = well_formed.replace(header + b"\r\n", header + b"xx")
    assert store.stat(key) is None
    assert store.stats.snapshot()["stat", "protocol"] == 1


def test_a_connection_with_surplus_replies_is_not_used_again(fault_proxy: FaultProxy, make_store: MakeStore) -> None:
    store = make_store(fault_proxy.url)
    assert [store.ping(), store.ping(), fault_proxy.num_connections] == [True, True, 1]
    fault_proxy.faults.forged_reply = b"+PONG\r\n+PONG\r\n"
    assert store.ping()
    fault_proxy.faults.forged_reply = None
    assert [store.ping(), fault_proxy.num_connections] == [True, 2]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("LOADING Redis is loading the dataset in memory", MissReason.LOADING),
        ("MISCONF Redis is configured to save RDB snapshots", MissReason.MISCONF),
        ("MOVED 3999 127.0.0.1:6381", MissReason.MOVED),
        ("ASK 3999 127.0.0.1:6381", MissReason.MOVED),
        ("TRYAGAIN Multiple keys request during rehashing of slot", MissReason.MOVED),
        ("CLUSTERDOWN The cluster is down", MissReason.CLUSTER_DOWN),
        ("MASTERDOWN Link with MASTER is down", MissReason.CLUSTER_DOWN),
        ("NOREPLICAS Not enough good replicas to write.", MissReason.READONLY),
        ("ERR max number of clients reached", MissReason.MAX_CLIENTS),
        ("SOMETHING new", MissReason.SERVER_ERROR),
    ],
)
def test_an_error_reply_is_a_miss_with_its_reason_and_does_not_open_the_breaker(
    fault_proxy: FaultProxy, make_store: MakeStore, reply: str, reason: MissReason
) -> None:
    store = make_store(fault_proxy.url, breaker=CircuitBreaker(failure_threshold=1))
    fault_proxy.faults.forged_reply = f"-{reply}\r\n".encode()
    assert read_all(store, fresh_key()) is reason
    assert store.state is BreakerState.CLOSED
    every_operation_fails_quietly(store)


# --- full and forbidden ---------------------------------------------------------------------------------------------


def test_a_full_server_refuses_the_write_and_still_serves_reads(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore
) -> None:
    store, stored, refused = make_store(own_redis.url), fresh_key(), fresh_key()
    assert write(store, stored, LARGE, memoryview(ROWS))
    admin.config_set("maxmemory-policy", "noeviction")
    for index in range(8):
        admin.set(f"filler-{index}", bytes(8 << 20))
    admin.config_set("maxmemory", 50 << 20)
    assert not write(store, refused, LARGE, memoryview(ROWS))
    assert store.stats.snapshot()["write", "oom"] == 1
    assert store.metadata(refused) is None
    assert read_all(store, stored) == ROWS
    assert store.state is BreakerState.CLOSED


def test_a_read_only_server_refuses_the_write_and_still_serves_reads(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore
) -> None:
    store, stored, refused = make_store(own_redis.url), fresh_key(), fresh_key()
    assert write(store, stored, LARGE, memoryview(ROWS))
    admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert not write(store, refused, LARGE, memoryview(ROWS))
    assert store.stats.snapshot()["write", "readonly"] == 1
    assert read_all(store, stored) == ROWS


def test_the_documented_access_rules_are_enough(own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore) -> None:
    rules = "on >pw ~lookonce:* resetchannels -@all +getrange +strlen +ping"
    admin.execute_command("ACL", "SETUSER", "reader", *rules.split())
    admin.execute_command("ACL", "SETUSER", "writer", *rules.split(), "+exists", "+set", "+pexpire", "+unlink", "+info")
    writer = make_store(url_of_user(own_redis, "writer", "pw"))
    reader = make_store(url_of_user(own_redis, "reader", "pw"))
    key = fresh_key()
    assert write(writer, key, LARGE, memoryview(ROWS))
    assert writer.touch(key)
    for store in (reader, writer):
        assert store.ping()
        assert store.stat(key) == store.metadata(key) == LARGE
        assert read_all(store, key) == ROWS
    assert remove(writer, key)
    assert admin.execute_command("ACL", "LOG") == []


def test_a_writer_without_the_right_to_info_still_writes(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore
) -> None:
    admin.execute_command("ACL", "SETUSER", "writer", "on", ">pw", "~lookonce:*", "+exists", "+set")
    store = make_store(url_of_user(own_redis, "writer", "pw"))
    assert write(store, fresh_key(), LARGE, memoryview(ROWS))
    assert write(store, fresh_key(), LARGE, memoryview(ROWS))
    denials = admin.execute_command("ACL", "LOG")
    assert len(denials) == 1, "the limit is asked for once per connection"


def test_a_read_only_role_leaves_a_damaged_entry_and_misses(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore
) -> None:
    admin.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~lookonce:*", "+getrange", "+strlen")
    reader, key = make_store(url_of_user(own_redis, "reader", "pw")), fresh_key()
    write(make_store(own_redis.url), key, LARGE, memoryview(ROWS))
    admin.setrange(data_key(key), 5000, b"damage")
    for _ in range(2):
        assert read_all(reader, key) is MissReason.BLOCK_SEAL
    assert admin.exists(data_key(key))
    assert reader.stats.snapshot()["delete", "noperm"] == 2
    assert not write(reader, fresh_key(), LARGE, memoryview(ROWS))


@pytest.mark.parametrize(
    ("user", "reason"), [("nobody:pw@", MissReason.AUTH), ("", MissReason.AUTH)], ids=["wrong password", "no password"]
)
def test_a_wrong_or_missing_password_is_a_miss(make_store: MakeStore, user: str, reason: MissReason) -> None:
    with EmbeddedRedis(64 << 20, use_tcp=True) as server:
        port = urllib.parse.urlsplit(server.url).port
        store = make_store(f"redis://{user}127.0.0.1:{port}", breaker=CircuitBreaker(failure_threshold=1))
        assert read_all(store, fresh_key()) is reason
        assert store.state is BreakerState.CLOSED
        every_operation_fails_quietly(store)


def test_a_server_without_a_free_connection_is_a_miss(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore
) -> None:
    store = make_store(own_redis.url, breaker=patient_breaker())
    admin.config_set("maxclients", 1)
    every_operation_fails_quietly(store)
    admin.config_set("maxclients", 100)
    assert store.ping()


# --- TLS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks_for_certificates", [False, True])
def test_rows_travel_over_tls(
    shared_redis: EmbeddedRedis, make_store: MakeStore, tmp_path: pathlib.Path, asks_for_certificates: bool
) -> None:
    authority, files = trustme.CA(), Files(tmp_path)
    files.issue(authority)
    ca, certificate, key_file = files.client(authority, "decoder")
    context = files.server_context(asks_for_certificates=asks_for_certificates)
    proxy = FaultProxy(urllib.parse.unquote(urllib.parse.urlsplit(shared_redis.url).path), context)
    own = f"&ssl_certfile={certificate}&ssl_keyfile={key_file}" if asks_for_certificates else ""
    try:
        store, key = make_store(f"{proxy.url}?ssl_ca_certs={ca}{own}", budget_s=30.0), fresh_key()
        assert write(store, key, LARGE, memoryview(ROWS))
        assert read_all(store, key) == ROWS
        assert make_store(proxy.url).stat(key) is None, "a certificate of an unknown issuer must not be trusted"
        without = make_store(f"{proxy.url}?ssl_ca_certs={ca}").stat(key)
        assert (without is None) == asks_for_certificates
    finally:
        proxy.close()
