"""Encode leases on a real server: only the holder renews and releases, and trouble with Redis means no lease."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from encoder_svc.cache.encode_lease import EncodeLeases, LeaseState
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import done_channel, lease_key
from lookonce.store.embedding_store import EmbeddingStore

TTL_S = 30.0
COMMANDS = "set pttl watch unwatch get multi exec pexpire unlink publish".split()


def key(name: str) -> ContentKey:
    return content_key(image_digest(name.encode()), EncoderFingerprint("f"), ProcessorOptions(), DEFAULT_TENANT)


def open_store(url: str, budget_s: float) -> contextlib.closing[EmbeddingStore]:
    return contextlib.closing(EmbeddingStore(url, budget_s, ttl_s=60, max_entry_bytes=64 << 20))


@pytest.fixture
def store(own_redis: EmbeddedRedis) -> Iterator[EmbeddingStore]:
    with open_store(own_redis.url, budget_s=0.3) as store:
        yield store


@pytest.fixture
def admin(own_redis: EmbeddedRedis) -> Iterator[Any]:
    """redis-py's own client, which changes settings and values behind the store's back."""
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def leases(store: EmbeddingStore) -> EncodeLeases:
    return EncodeLeases(store, TTL_S)


def test_one_replica_holds_the_lease_and_the_others_learn_its_remaining_time(leases: EncodeLeases) -> None:
    mine, other = leases.acquire(key("a")), leases.acquire(key("a"))
    assert (mine.state, other.state) == (LeaseState.HELD, LeaseState.BUSY)
    assert len(mine.token) == 32
    assert not other.token
    assert TTL_S - 5 < other.remaining_s <= TTL_S
    assert leases.acquire(key("b")).state is LeaseState.HELD


def test_after_the_release_another_replica_gets_the_lease(leases: EncodeLeases) -> None:
    first = leases.acquire(key("a"))
    assert leases.release(key("a"), first.token, b"stored")
    second = leases.acquire(key("a"))
    assert second.state is LeaseState.HELD
    assert second.token != first.token


def test_a_stale_holder_can_neither_renew_nor_release(leases: EncodeLeases, admin: Any) -> None:
    stale = leases.acquire(key("a"))
    admin.delete(lease_key(key("a")))
    new = leases.acquire(key("a"))
    assert not leases.renew(key("a"), stale.token)
    assert not leases.release(key("a"), stale.token, b"stored")
    assert admin.get(lease_key(key("a"))) == new.token
    assert leases.renew(key("a"), new.token)


def test_a_lease_lasts_while_it_is_renewed_and_then_expires(store: EmbeddingStore, admin: Any) -> None:
    leases = EncodeLeases(store, ttl_s=0.4)
    held = leases.acquire(key("a"))
    admin.pexpire(lease_key(key("a")), 60)
    assert leases.renew(key("a"), held.token)
    assert admin.pttl(lease_key(key("a"))) > 60
    while admin.exists(lease_key(key("a"))):
        time.sleep(0.02)
    assert leases.acquire(key("a")).state is LeaseState.HELD
    assert not leases.renew(key("a"), held.token)


def test_a_replica_that_lost_the_lease_still_announces_the_end(leases: EncodeLeases, admin: Any) -> None:
    with admin.pubsub(ignore_subscribe_messages=True) as subscription:
        subscription.subscribe(done_channel(key("a")))
        subscription.get_message(timeout=5)
        assert not leases.release(key("a"), b"never held", b"not stored")
        message = None
        while message is None:
            message = subscription.get_message(timeout=5)
        assert message["data"] == b"not stored"


def test_a_lease_that_changes_under_the_comparison_is_left_alone(leases: EncodeLeases, admin: Any) -> None:
    """WATCH detects a change between the comparison and the command."""
    held = leases.acquire(key("a"))

    def take_over() -> tuple[bytes, bytes]:
        admin.set(lease_key(key("a")), b"another's")
        return (b"UNLINK", lease_key(key("a")))

    assert not leases._if_mine(key("a"), held.token, take_over)
    assert admin.get(lease_key(key("a"))) == b"another's"


def test_a_release_that_meets_a_renewal_of_its_own_lease_frees_it(leases: EncodeLeases, admin: Any) -> None:
    """An encode may end while a thread renews its lease."""
    for number in range(100):
        one = key(f"image {number}")
        held = leases.acquire(one)
        renewal = threading.Thread(target=leases.renew, args=(one, held.token))
        renewal.start()
        assert leases.release(one, held.token, b"failed")
        renewal.join()
        assert not admin.exists(lease_key(one))


def test_the_documented_commands_are_enough(own_redis: EmbeddedRedis, admin: Any) -> None:
    rules = ["on", ">secret", "~lookonce:*", "&lookonce:*", *(f"+{command}" for command in COMMANDS)]
    admin.execute_command("ACL", "SETUSER", "encoder", *rules)
    with open_store(own_redis.url.replace("unix://", "unix://encoder:secret@"), budget_s=2.0) as store:
        leases = EncodeLeases(store, TTL_S)
        held = leases.acquire(key("a"))
        assert held.state is LeaseState.HELD
        assert leases.acquire(key("a")).state is LeaseState.BUSY
        assert not leases.renew(key("a"), b"another's")
        assert leases.renew(key("a"), held.token)
        assert leases.release(key("a"), held.token, b"stored")


@pytest.mark.parametrize("trouble", ["frozen", "gone", "read-only role"])
def test_without_redis_there_are_no_leases(
    leases: EncodeLeases, store: EmbeddingStore, own_redis: EmbeddedRedis, admin: Any, trouble: str
) -> None:
    held = leases.acquire(key("a"))
    if trouble == "frozen":
        os.kill(own_redis.pid, signal.SIGSTOP)
    elif trouble == "gone":
        own_redis.stop()
    else:
        admin.execute_command("ACL", "SETUSER", "default", "-set", "-watch", "-publish")
    try:
        assert leases.acquire(key("b")).state is LeaseState.UNAVAILABLE
        assert not leases.renew(key("a"), held.token)
        assert not leases.release(key("a"), held.token, b"stored")
    finally:
        if trouble == "frozen":
            os.kill(own_redis.pid, signal.SIGCONT)
    failed = [count for (operation, outcome), count in store.stats.snapshot().items() if outcome != "ok"]
    assert sum(failed) >= 3
