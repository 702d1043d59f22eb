"""No encode that began before a removal leaves rows behind it, whatever its replica has heard of the removal."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import redis
from prometheus_client import CollectorRegistry

from encoder_svc.cache.cache_admin import CacheAdmin
from encoder_svc.cache.cache_control import CacheControl
from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.done_channel import DoneChannel
from encoder_svc.cache.encode_lease import EncodeLeases
from encoder_svc.cache.fleet_flight import FleetFlight
from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.metrics import EncoderMetrics
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ImageDigest,
    ProcessorOptions,
    Tenant,
    content_key,
    file_tag,
    image_digest,
    pair_digest,
)
from lookonce.forgotten import Forgotten, new_token, to_message
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import FORGET_CHANNEL, FORGET_TOKEN, data_key, lease_key
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.forget_channel import ForgetListener, token_in
from lookonce.store.redis.exchange import Exchange
from lookonce.tenants import Tenants
from tests.encoder_svc.encode_requests import settled
from tests.lookonce.store.entries import SMALL, make_rows, read

FINGERPRINT = EncoderFingerprint("f" * 64)
OTHER_TENANT = Tenants(None).named("other")
ROWS = memoryview(make_rows(SMALL)).toreadonly()
TIMEOUT_S = 30.0
# Longer than two operations of a replica take in these tests, on a busy machine, too.
SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class Picture:
    """An image or a pair of frames, and the files that it was made from."""

    files: tuple[str, ...]
    tenant: Tenant = DEFAULT_TENANT
    options: ProcessorOptions = field(default_factory=ProcessorOptions)

    @property
    def digests(self) -> list[ImageDigest]:
        return [image_digest(file.encode()) for file in self.files]

    @property
    def tags(self) -> tuple[bytes, ...]:
        return tuple(file_tag(digest, self.tenant) for digest in self.digests)

    @property
    def key(self) -> ContentKey:
        digest = self.digests[0] if len(self.files) == 1 else pair_digest(*self.digests)
        return content_key(digest, FINGERPRINT, self.options, self.tenant)


class DeafWatch:
    """A subscription that is dead without a sign, and never was told of a removal."""

    last_token = heard_token = b""

    def has_heard(self, token: bytes) -> bool:
        return False

    def removed_since(self, token: bytes, key: bytes, file_tags: Sequence[bytes]) -> bool:
        return False


@dataclass(slots=True, eq=False)
class Encode:
    """An encode in progress, which stores its rows once `gate` is open. Its rows begin with its number."""

    number: int
    picture: Picture
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    # Token of the last removal that its replica, or a decoder, had heard of when the image arrived.
    arrival_token: bytes | None = None
    # Time at which it began, on the monotonic clock; infinity before.
    began_s: float = math.inf
    # Set when it has its lease.
    is_claimed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[bool] | None = None

    @property
    def rows(self) -> memoryview:
        return memoryview(self.number.to_bytes(8, "little") + ROWS[8:]).toreadonly()


class Replica:
    """An encoder without a model: its encodes wait for the test."""

    def __init__(self, url: str, *, is_deaf: bool, settle_s: float) -> None:
        self.is_deaf = is_deaf
        self.store = EmbeddingStore(url, 5.0, 60, 1 << 20)
        metrics = EncoderMetrics(CollectorRegistry())
        self.listener = ForgetListener(url, 1.0, lambda forgotten: self.tiers.forget(forgotten))
        self.tiers = CacheTiers(
            LocalCache(1 << 20),
            self.store,
            metrics,
            num_threads=2,
            forget_watch=DeafWatch() if is_deaf else self.listener,
            settle_s=settle_s,
        )
        self.done = DoneChannel(url, 1.0)
        self.fleet = FleetFlight(
            EncodeLeases(self.store, 20.0),
            self.done,
            self.tiers.find_again,
            metrics,
            num_threads=2,
            is_answering=lambda: True,
        )

    async def start(self) -> None:
        self.done.start()
        if not self.is_deaf:
            self.listener.start()
            await self.listener.wait_until_listening()

    async def close(self) -> None:
        await self.fleet.close()
        await self.listener.close()
        self.tiers.close()
        self.store.close()

    async def begun(self, picture: Picture, *, refresh: bool = False) -> Encode:
        """Begins an encode, and returns when it has its lease."""
        encode = self.beginning(0, picture, refresh=refresh)
        async with asyncio.timeout(TIMEOUT_S):
            await encode.is_claimed.wait()
        return encode

    def beginning(
        self,
        number: int,
        picture: Picture,
        *,
        refresh: bool = False,
        arrival_token: bytes | Literal["now"] | None = "now",
    ) -> Encode:
        """Begins an encode in a task of its own."""
        token = self.tiers.removals.heard_token if arrival_token == "now" else arrival_token
        encode = Encode(number, picture, arrival_token=token)
        encode.task = asyncio.create_task(self._encode(encode, refresh=refresh))
        return encode

    async def _encode(self, encode: Encode, *, refresh: bool) -> bool:
        """Does what the pipeline does. Returns whether the rows were stored, or found."""
        picture = encode.picture
        async with contextlib.AsyncExitStack() as stack:
            encode.began_s = time.monotonic()
            progress = await stack.enter_async_context(
                self.tiers.encoding(picture.key, picture.tags, encode.arrival_token)
            )
            claim = None
            if not refresh:
                claim = await stack.enter_async_context(self.fleet.claimed(picture.key, picture.tags))
                self.tiers.removals.hold(progress, claim.lease_token)
            encode.is_claimed.set()
            if claim is not None and claim.found is not None:
                return True
            await encode.gate.wait()
            entry = LocalEmbedding(replace(SMALL, file_tags=picture.tags), encode.rows, 1.0)
            stored = await self.tiers.put(picture.key, entry, refresh=refresh, encode=progress)
            if claim is not None:
                claim.stored = stored
            return stored

    async def finished(self, encode: Encode) -> bool:
        """Lets an encode store its rows. Returns whether it did."""
        encode.gate.set()
        assert encode.task is not None
        async with asyncio.timeout(TIMEOUT_S):
            return await encode.task


@contextlib.asynccontextmanager
async def replicas(url: str, *deaf: bool, settle_s: float = SETTLE_S) -> AsyncIterator[list[Replica]]:
    async with contextlib.AsyncExitStack() as stack:
        started = []
        for is_deaf in deaf:
            replica = Replica(url, is_deaf=is_deaf, settle_s=settle_s)
            stack.push_async_callback(replica.close)
            async with asyncio.timeout(TIMEOUT_S):
                await replica.start()
            started.append(replica)
        yield started


@contextlib.contextmanager
def controlled(replica: Replica, url: str) -> Iterator[CacheControl]:
    """The operators' control at this replica."""
    with contextlib.closing(
        CacheControl(replica.tiers, CacheAdmin(url), FINGERPRINT, ttl_s=60, restore_s=SETTLE_S)
    ) as control:
        yield control


async def removed(control: CacheControl, file: str, tenant: Tenant = DEFAULT_TENANT) -> None:
    """Removes a file as the operators' service does: its plain key is known, others are found by their tags."""
    picture = Picture((file,), tenant)
    await control.evict(picture.digests, [picture.key], tenant)


async def is_stored(replica: Replica, picture: Picture) -> bool:
    return await asyncio.to_thread(replica.store.stat, picture.key) is not None


@pytest.mark.parametrize("is_deaf", [False, True])
@pytest.mark.parametrize("refresh", [False, True])
async def test_an_encode_during_a_removal_stores_nothing_also_where_the_message_was_not_heard(
    own_redis: EmbeddedRedis, is_deaf: bool, refresh: bool
) -> None:
    pictures = [
        Picture(("cat",)),
        Picture(("cat",), options=ProcessorOptions(max_pixels=1000)),
        Picture(("dog", "cat"), options=ProcessorOptions(frame_size=(28, 28))),
    ]
    spared = [Picture(("dog",)), Picture(("cat",), OTHER_TENANT)]
    async with replicas(own_redis.url, False, is_deaf) as (mine, other):
        encodes = [await other.begun(picture, refresh=refresh) for picture in pictures + spared]
        with controlled(mine, own_redis.url) as control:
            await removed(control, "cat")
        if not is_deaf:
            # Until it has heard the last message, it cannot tell which image that one removed.
            token = await asyncio.to_thread(token_in, other.store)
            await settled(lambda: other.listener.last_token == token)
        stored = [await other.finished(encode) for encode in encodes]
        assert stored[: len(pictures)] == [False] * len(pictures)
        assert not any([await is_stored(other, picture) for picture in pictures])
        if not is_deaf:
            assert not any(other.tiers.holds(picture.key) for picture in pictures)
        if not (is_deaf and refresh):
            # Without a lease and without the message, this replica cannot tell which image was removed.
            assert stored[len(pictures) :] == [True] * len(spared)
        if not is_deaf:
            # A request that brings the image afterwards stores it.
            assert await other.finished(await other.begun(pictures[0]))


async def test_all_images_of_a_tenant_or_one_pair_are_removed_as_they_are_being_encoded(
    own_redis: EmbeddedRedis,
) -> None:
    pairs = [Picture((name, "cat"), options=ProcessorOptions(frame_size=(28, 28))) for name in ("dog", "cow")]
    theirs = Picture(("dog",), OTHER_TENANT)
    async with replicas(own_redis.url, False, True) as (mine, other):
        with controlled(mine, own_redis.url) as control:
            encodes = [await other.begun(picture) for picture in (*pairs, theirs)]
            await control.evict_pairs([pairs[0].key])
            assert [await other.finished(encode) for encode in encodes] == [False, True, True]
            encodes = [await other.begun(Picture((name,), OTHER_TENANT)) for name in ("cow", "hen")]
            encodes.append(await other.begun(Picture(("cow",))))
            assert await control.evict_tenant(OTHER_TENANT) == 1
            assert [await other.finished(encode) for encode in encodes] == [False, False, True]
            last = await other.begun(Picture(("last",)))
            assert await control.evict_all() == 2
            assert not await other.finished(last)


async def test_an_image_that_waited_when_it_was_removed_is_not_stored(own_redis: EmbeddedRedis) -> None:
    """It waits in a queue of its encoder, or of a decoder, which says what it had heard."""
    async with replicas(own_redis.url, False, False) as (mine, other):
        before = other.tiers.removals.heard_token
        with controlled(mine, own_redis.url) as control:
            await removed(control, "cat")
            await settled(lambda: other.listener.last_token == mine.listener.last_token != before)
        stored = {}
        for name, token in (("cat", before), ("dog", before), ("cow", b"a token that nobody heard"), ("hen", None)):
            encode = other.beginning(0, Picture((name,)), arrival_token=token)
            stored[name] = await other.finished(encode)
        assert stored == {"cat": False, "dog": True, "cow": False, "hen": True}
        assert await other.finished(await other.begun(Picture(("cat",)))), "it arrives anew"


class LateNews(CacheAdmin):
    """Sends its messages some time after the call, in order, as a slow network does."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._url, self._sending = url, ThreadPoolExecutor(1)

    def tell_to_forget(self, forgotten: Forgotten, *, until_s: float = math.inf) -> bytes:
        token = new_token()
        with redis.Redis.from_url(self._url) as client:
            client.set(FORGET_TOKEN, token)
        self._sending.submit(self._send, token, forgotten)
        return token

    def _send(self, token: bytes, forgotten: Forgotten) -> None:
        time.sleep(0.1)
        with redis.Redis.from_url(self._url) as client:
            client.publish(FORGET_CHANNEL, to_message(token, forgotten))

    def close(self) -> None:
        self._sending.shutdown()
        super().close()


async def test_an_image_that_arrives_after_a_removal_is_stored_however_late_the_message_comes(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_svc.cache.removals._NUM_LOOKS", 4000)
    async with replicas(own_redis.url, False) as (mine,):
        await mine.finished(await mine.begun(Picture(("cat",))))
        control = CacheControl(mine.tiers, LateNews(own_redis.url), FINGERPRINT, ttl_s=60, restore_s=0.0)
        with contextlib.closing(control):
            await control.evict_all()
            assert not await is_stored(mine, Picture(("cat",)))
            encode = await mine.begun(Picture(("cat",)))
            token = await asyncio.to_thread(token_in, mine.store)
            await settled(lambda: mine.listener.last_token == token)
            assert await mine.finished(encode)


class HeldAdmin(CacheAdmin):
    """Revokes no lease before the test allows it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_waiting, self.may_revoke = threading.Event(), threading.Event()

    def revoke_leases_in(self, *arguments: Any, **keywords: Any) -> None:
        self.is_waiting.set()
        assert self.may_revoke.wait(TIMEOUT_S)
        super().revoke_leases_in(*arguments, **keywords)


async def test_a_copy_that_was_made_during_a_removal_does_not_outlive_it(own_redis: EmbeddedRedis) -> None:
    picture = Picture(("cat",))
    async with replicas(own_redis.url, False, True) as (mine, deaf):
        encode = await deaf.begun(picture)
        admin = HeldAdmin(own_redis.url)
        with contextlib.closing(CacheControl(mine.tiers, admin, FINGERPRINT, ttl_s=60, restore_s=SETTLE_S)) as control:
            removal = asyncio.create_task(removed(control, "cat"))
            assert await asyncio.to_thread(admin.is_waiting.wait, TIMEOUT_S)
            # It has not heard of the removal, and still has its lease.
            assert await deaf.finished(encode)
            assert await mine.tiers.prewarm(picture.key)
            admin.may_revoke.set()
            await removal
        assert not mine.tiers.holds(picture.key)
        assert not await is_stored(mine, picture)


async def test_a_lease_that_is_gone_without_a_removal_does_not_keep_rows_out_of_the_cache(
    own_redis: EmbeddedRedis, admin: redis.Redis
) -> None:
    picture = Picture(("cat",))
    async with replicas(own_redis.url, False, True) as both:
        for replica in both:
            encode = await replica.begun(picture)
            assert admin.delete(lease_key(picture.key)) == 1
            assert await replica.finished(encode)
            assert admin.delete(data_key(picture.key)) == 1


async def test_a_lease_that_came_late_does_not_stand_for_the_time_before_it(own_redis: EmbeddedRedis) -> None:
    """An encode that waits for another replica takes its lease after the removal, and has not heard of it."""
    picture = Picture(("cat",))
    async with replicas(own_redis.url, False, True) as (mine, other):
        first = await mine.begun(picture)
        late = other.beginning(2, picture)
        async with asyncio.timeout(TIMEOUT_S):
            while not other.done._listeners:
                await asyncio.sleep(0.005)
        with controlled(mine, own_redis.url) as control:
            await removed(control, "cat")
        # The first lease was revoked, so the other replica gets one.
        async with asyncio.timeout(TIMEOUT_S):
            await late.is_claimed.wait()
        assert not await other.finished(late)
        assert not await mine.finished(first)
        assert not await is_stored(mine, picture)


async def test_a_lease_that_is_revoked_while_the_rows_are_sent_keeps_them_out(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = Picture(("cat",))
    async with replicas(own_redis.url, True) as (replica,), contextlib.AsyncExitStack() as stack:
        admin = stack.enter_context(contextlib.closing(CacheAdmin(own_redis.url)))
        encode = await replica.begun(picture)
        limit_bytes = replica.store._limit_bytes

        def revoked_meanwhile(exchange: Exchange) -> int:
            # Between the check of the lease and the transaction.
            admin.tell_to_forget(Forgotten.of_files(picture.tags))
            admin.revoke_leases([picture.key])
            return limit_bytes(exchange)

        monkeypatch.setattr(replica.store, "_limit_bytes", revoked_meanwhile)
        assert not await replica.finished(encode)
        assert not await is_stored(replica, picture)
        assert replica.store.stats.snapshot()["write", "lease_lost"] == 1


@dataclass(slots=True)
class Model:
    """The rule: what is in a cache after a removal was encoded since the removal began."""

    # By file and tenant: when the last removal that has ended began, on the monotonic clock.
    removals: dict[tuple[str, Tenant], float] = field(default_factory=dict)
    encodes: list[Encode] = field(default_factory=list)
    num_checked: int = 0

    def check(self, picture: Picture, rows: bytes | memoryview) -> None:
        """Raises AssertionError if a cache must not have these rows."""
        encode = self.encodes[int.from_bytes(rows[:8], "little")]
        assert encode.picture == picture
        self.num_checked += 1
        for file in picture.files:
            assert encode.began_s >= self.removals.get((file, picture.tenant), -math.inf), "rows of a removed image"


PICTURES = [
    *(Picture((file,), tenant) for file in "abc" for tenant in (DEFAULT_TENANT, OTHER_TENANT)),
    *(Picture((file,), options=ProcessorOptions(max_pixels=1000)) for file in "ab"),
    *(Picture((one, other), options=ProcessorOptions(frame_size=(28, 28))) for one in "ab" for other in "bc"),
]


@pytest.mark.parametrize("seed", range(3))
async def test_random_encodes_and_removals_keep_to_the_rule(own_redis: EmbeddedRedis, seed: int) -> None:
    chance, model, running = random.Random(seed), Model(), list[tuple[Replica, Encode]]()
    async with replicas(own_redis.url, False, False, True) as fleet:
        with controlled(fleet[0], own_redis.url) as control:
            for _ in range(12):
                file, tenant = chance.choice("abc"), chance.choice([DEFAULT_TENANT, OTHER_TENANT])
                removal_began_s = time.monotonic()
                removing = asyncio.create_task(removed(control, file, tenant))
                while not removing.done():
                    if chance.random() < 0.5:
                        replica, picture = chance.choice(fleet), chance.choice(PICTURES)
                        encode = replica.beginning(len(model.encodes), picture, refresh=chance.random() < 0.3)
                        model.encodes.append(encode)
                        running.append((replica, encode))
                    elif running:
                        _, encode = running.pop(chance.randrange(len(running)))
                        encode.gate.set()
                    await asyncio.sleep(chance.choice([0, 0.001, 0.02]))
                await removing
                model.removals[file, tenant] = removal_began_s
                for _ in range(3):
                    await check_caches(fleet, model)
                    if running:
                        _, encode = running.pop(chance.randrange(len(running)))
                        encode.gate.set()
                        await asyncio.sleep(0.02)
            for encode in model.encodes:
                encode.gate.set()
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*(encode.task for encode in model.encodes if encode.task is not None))
            await check_caches(fleet, model)
            assert model.num_checked > 100, "the workload shows something"


async def check_caches(fleet: list[Replica], model: Model) -> None:
    """Raises AssertionError if the shared cache, or that of a replica that hears messages, breaks the rule."""
    token = await asyncio.to_thread(token_in, fleet[0].store)
    async with asyncio.timeout(TIMEOUT_S):
        while any(replica.listener.last_token != token for replica in fleet if not replica.is_deaf):
            await asyncio.sleep(0.001)
    for picture in PICTURES:
        rows = await asyncio.to_thread(read, fleet[0].store, picture.key, SMALL, 0, SMALL.num_rows)
        if isinstance(rows, bytes):
            model.check(picture, rows)
        for replica in fleet:
            if not replica.is_deaf and (entry := replica.tiers.local.get(picture.key.value)) is not None:
                model.check(picture, entry.rows)
