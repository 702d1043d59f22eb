"""A removal that answers OK is sure: with Redis changing its primary, hanging, or refusing its user a command."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pathlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
import redis
from prometheus_client import CollectorRegistry

from encoder_svc.cache.cache_admin import ATTEMPT_S, CacheAdmin
from encoder_svc.cache.cache_control import CacheControl
from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.local_cache import LocalCache
from encoder_svc.metrics import EncoderMetrics
from lookonce.content_key import DEFAULT_TENANT, ContentKey, EncoderFingerprint, file_tag
from lookonce.errors import CacheAccessError, UnavailableError
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import data_key
from lookonce.store.embedding_store import EmbeddingStore
from tests.lookonce.store.entries import SMALL, fresh_key, make_rows, write
from tests.lookonce.store.redis.redis_fleet import SERVICE, SentinelFleet, until

USERS = pathlib.Path(__file__).parents[3] / "deploy/redis/users.acl"
ROWS = memoryview(make_rows(SMALL))
FINGERPRINT = EncoderFingerprint("f" * 64)
NEVER_MS = 3_600_000
NUM_IMAGES = 400
# Time that a busy machine may add to a call.
MARGIN_S = 2.5


@pytest.fixture
def fleet() -> Iterator[SentinelFleet]:
    """A primary, a replica and Sentinels; the primary changes only when the test says so."""
    fleet = SentinelFleet(down_after_ms=NEVER_MS)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


@contextlib.asynccontextmanager
async def controlling(url: str) -> AsyncIterator[CacheControl]:
    """The operators' control of an encoder without rows of its own."""
    tiers = CacheTiers(LocalCache(0), None, EncoderMetrics(CollectorRegistry()), num_threads=1)
    control = CacheControl(tiers, CacheAdmin(url), FINGERPRINT, ttl_s=30, restore_s=0.05)
    try:
        yield control
    finally:
        control.close()
        tiers.close()


def written(store: EmbeddingStore, number: int) -> list[ContentKey]:
    """Writes entries of different files and returns their keys."""
    keys = [fresh_key() for _ in range(number)]
    for key in keys:
        meta = replace(SMALL, file_tags=(file_tag(key.digest, DEFAULT_TENANT),))
        assert write(store, key, meta, ROWS)
    return keys


async def evict(control: CacheControl, key: ContentKey, *, until_s: float = math.inf) -> int:
    return (await control.evict([key.digest], [key], DEFAULT_TENANT, until_s=until_s)).num_entries


async def test_no_image_that_was_reported_as_removed_survives_a_planned_failover(fleet: SentinelFleet) -> None:
    with contextlib.closing(EmbeddingStore(fleet.url, 5.0, 600, 1 << 20)) as store:
        keys = written(store, NUM_IMAGES)
    until(lambda: fleet.replica.ask("DBSIZE") >= 2 * len(keys), "the replica lacks images")
    waiting, reported = list(keys), []
    async with controlling(fleet.url) as control:
        assert await evict(control, waiting[0]) == 1
        fleet.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
        while waiting and fleet.primary.ask("ROLE")[0] == b"master":
            with contextlib.suppress(UnavailableError):
                await evict(control, waiting[0])
                reported.append(waiting.pop(0))
        assert reported, "removals work before and after the failover"
        assert [key for key in reported if fleet.replica.ask("EXISTS", data_key(key))] == []
        until(lambda: fleet.primary.ask("ROLE")[0] == b"slave", "the old primary was not demoted")
        left = fresh_key() if not waiting else waiting[0]
        assert await evict(control, left) == bool(waiting), "the new primary is used"


async def test_sentinels_that_hide_their_state_still_name_the_primary(fleet: SentinelFleet) -> None:
    for sentinel in fleet.sentinels:
        sentinel.ask("ACL", "SETUSER", "narrow", "on", ">pw", "-@all", "+sentinel|get-master-addr-by-name")
    url = f"{fleet.url}?sentinel_username=narrow&sentinel_password=pw"
    async with controlling(url) as control:
        assert await evict(control, fresh_key()) == 0


async def test_a_removal_needs_an_answer_of_a_sentinel(fleet: SentinelFleet) -> None:
    async with controlling(fleet.url) as control:
        assert await evict(control, fresh_key()) == 0
        for sentinel in fleet.sentinels:
            sentinel.stop()
        with pytest.raises(UnavailableError):
            await evict(control, fresh_key())


async def test_a_hung_redis_ends_every_call_before_its_deadline(own_redis: EmbeddedRedis) -> None:
    async with controlling(own_redis.url) as control:
        assert await evict(control, fresh_key()) == 0
        calls: list[Callable[[float], Awaitable[object]]] = [
            lambda until_s: evict(control, fresh_key(), until_s=until_s),
            lambda until_s: control.evict_all(until_s=until_s),
            lambda until_s: control.pin([fresh_key()], unpin=False, until_s=until_s),
            lambda until_s: control.describe([fresh_key()], until_s=until_s),
            lambda until_s: control.shared_statistics(until_s=until_s),
            lambda until_s: control.prewarm(fresh_key(), until_s=until_s),
        ]
        os.kill(own_redis.pid, signal.SIGSTOP)
        try:
            for call, timeout_s in ((calls[0], math.inf), *((call, 1.0) for call in calls)):
                async with asyncio.timeout(min(timeout_s, 2 * ATTEMPT_S) + MARGIN_S):
                    with pytest.raises(UnavailableError):
                        await call(time.monotonic() + timeout_s)
        finally:
            os.kill(own_redis.pid, signal.SIGCONT)


async def test_a_refused_command_is_not_answered_with_call_again(own_redis: EmbeddedRedis) -> None:
    (line,) = (line for line in USERS.read_text().splitlines() if line.startswith("user lookonce-encoder"))
    rules = [rule for rule in line.split()[3:] if not rule.startswith("#")]
    with redis.Redis.from_url(own_redis.url) as server:
        server.execute_command("ACL", "SETUSER", "encoder", "on", ">pw", *rules)
    path = own_redis.url.removeprefix("unix://")
    for url in (f"unix://encoder:pw@{path}", f"unix://encoder:wrong@{path}"):
        async with controlling(url) as control:
            for call in (
                evict(control, fresh_key()),
                control.evict_all(),
                control.pin([fresh_key()], unpin=False),
            ):
                with pytest.raises(CacheAccessError, match="lookonce-janitor") as refused:
                    await call
                assert "call again" not in refused.value.message
