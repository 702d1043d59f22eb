"""Whatever Redis holds or replies, a decoder gets exactly the model's rows of the picture, in 300 cases."""

from __future__ import annotations

import asyncio
import enum
import functools
import itertools
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio
import redis
from prometheus_client import CollectorRegistry

from decoder_svc.rows.embedding_fetcher import EmbeddingFetcher
from decoder_svc.rows.encoder_client import EncoderClient
from decoder_svc.rows.fetch_metrics import FetchMetrics
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.content_key import DEFAULT_TENANT, ContentKey, ProcessorOptions, content_key, image_digest
from lookonce.errors import LookonceError
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store import embedding_store
from lookonce.store.cache_names import data_key, lease_key, metadata_key
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.circuit_breaker import CircuitBreaker
from tests import image_files, tiny_models
from tests.decoder_svc.encoders import client, running_encoder
from tests.lookonce.store import damage
from tests.lookonce.store.redis.resp_server import After, Lie, RespServer, always, changed, instead

# The tests share services, which belong to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_ROWS = 16
PART = RowRange(3, 9)
OPTIONS = ProcessorOptions()
# Limit that detects a hang. Nothing here waits for more than a few budgets and leases.
HANG_S = 20.0
BUDGET_S = 0.3
LEASE_S = 0.3
# One image at a time in the model, so that every encode gives the same bits.
ENCODER = {"deterministic": True, "redis_budget_s": BUDGET_S, "encode_lease_s": LEASE_S, "num_threads": 1}


class Cached(enum.Enum):
    """Caches that have the picture's rows beforehand."""

    NOWHERE = "nowhere"
    # Written by another encoder.
    REDIS = "in Redis"
    # Written by this encoder.
    BOTH = "in Redis and in the encoder"


@dataclass(frozen=True, slots=True)
class Decoder:
    """A client that fetches rows as a decoder does."""

    fetcher: EmbeddingFetcher
    encoder: EncoderClient
    store: EmbeddingStore | None

    async def key(self, picture: bytes) -> ContentKey:
        """Returns the content key of the picture."""
        info = await self.encoder.info()
        return content_key(image_digest(picture), info.fingerprint, OPTIONS, DEFAULT_TENANT)

    async def fetch(self, picture: bytes, rows: RowRange) -> bytes:
        """Returns the rows' bytes. Raises the error that would end the request."""
        ended: asyncio.Future[FetchedRows] = asyncio.get_running_loop().create_future()

        def failed(_: RowFetch, error: LookonceError) -> None:
            ended.set_exception(error)

        fetch = RowFetch(await self.key(picture), rows, NUM_ROWS, OPTIONS, picture, RequestId("r"))
        self.fetcher.start(fetch, ended.set_result, failed)
        async with asyncio.timeout(HANG_S):
            return bytes((await ended).data)


@asynccontextmanager
async def open_decoder(target: str, redis_url: str | None) -> AsyncIterator[Decoder]:
    store = None if redis_url is None else EmbeddingStore(redis_url, BUDGET_S, 600, 0)
    async with AsyncExitStack() as stack:
        if store is not None:
            stack.callback(store.close)
        encoder = await stack.enter_async_context(client(target))
        fetcher = EmbeddingFetcher(
            store, encoder, num_workers=2, timeout_s=HANG_S / 2, ttl_s=600, metrics=FetchMetrics(CollectorRegistry())
        )
        stack.push_async_callback(fetcher.close)
        yield Decoder(fetcher, encoder, store)


@dataclass(slots=True)
class World:
    """An encoder and a decoder, each with a server that may lie before one real Redis, and two honest clients."""

    admin: Any
    beside_encoder: RespServer
    beside_decoder: RespServer
    decoder: Decoder
    # Asks an encoder without any cache.
    reference: Decoder
    # Writes rows that others are to find.
    writer: Decoder
    pictures: Iterator[bytes]
    # Rows of all pictures of this test so far.
    rows: set[bytes] = field(default_factory=set)
    # Outcomes that the decoder's store had counted before this test, by (operation, outcome).
    counted: dict[tuple[str, str], int] = field(default_factory=dict)

    async def prepared(self, cached: Cached) -> tuple[bytes, bytes]:
        """Returns a new picture, cached as asked, and its rows."""
        while True:
            picture = next(self.pictures)
            expected = await self.reference.fetch(picture, RowRange(0, NUM_ROWS))
            assert expected not in self.rows
            self.rows.add(expected)
            if cached is Cached.NOWHERE:
                return picture, expected
            before = self.writer if cached is Cached.REDIS else self.decoder
            assert await before.fetch(picture, RowRange(0, NUM_ROWS)) == expected
            # On a busy machine, the encode's lease may have expired, and then it may not be stored.
            if self.admin.exists(data_key(await self.decoder.key(picture))):
                return picture, expected

    async def check(self, cached: Cached, sabotage: Sabotage) -> None:
        """Checks that a new picture gives its own rows during the sabotage and after it."""
        picture, expected = await self.prepared(cached)
        part = expected[len(expected) // NUM_ROWS * PART.start : len(expected) // NUM_ROWS * PART.stop]
        sabotage(self, await self.decoder.key(picture))
        assert await self.decoder.fetch(picture, RowRange(0, NUM_ROWS)) == expected
        assert await self.decoder.fetch(picture, PART) == part
        self.lie(None)
        assert await self.decoder.fetch(picture, PART) == part

    @property
    def reasons(self) -> set[str]:
        """Returns the outcomes that the decoder's store has counted in this test."""
        counts = self.stats().items()
        return {outcome for (operation, outcome), count in counts if count > self.counted.get((operation, outcome), 0)}

    def stats(self) -> dict[tuple[str, str], int]:
        """Returns the counts of the decoder's store, by (operation, outcome)."""
        assert self.decoder.store is not None
        return self.decoder.store.stats.snapshot()

    def lie(self, lie: Lie | None) -> None:
        """Makes both servers lie, or be honest again."""
        self.beside_encoder.lie(lie)
        self.beside_decoder.lie(lie)


Sabotage = Callable[[World, ContentKey], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")


@asynccontextmanager
async def open_world(folder: pathlib.Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        real = stack.enter_context(EmbeddedRedis())
        admin = stack.enter_context(redis.Redis.from_url(real.url))
        liars = [RespServer(real.url), RespServer(real.url)]
        for liar in liars:
            stack.callback(liar.close)
        enter = stack.enter_async_context
        encoder = await enter(running_encoder(folder, redis_url=liars[0].url, **ENCODER))
        writer = await enter(running_encoder(folder, redis_url=real.url, **ENCODER))
        reference = await enter(running_encoder(folder, **ENCODER))
        yield World(
            admin,
            liars[0],
            liars[1],
            await enter(open_decoder(encoder, liars[1].url)),
            await enter(open_decoder(reference, None)),
            await enter(open_decoder(writer, real.url)),
            (image_files.encoded(image_files.noise(seed, 70, 60)) for seed in itertools.count()),
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def patient_world(folder: pathlib.Path) -> AsyncIterator[World]:
    """A world whose breakers stay closed, so that every lie reaches a client."""
    with pytest.MonkeyPatch.context() as patch:
        breaker = functools.partial(CircuitBreaker, failure_threshold=1_000_000)
        patch.setattr(embedding_store, "CircuitBreaker", breaker)
        async with AsyncExitStack() as stack:
            world = await stack.enter_async_context(open_world(folder))
            # The breakers exist by now, and the world of another test has ordinary ones.
            patch.undo()
            yield world


@pytest.fixture
def world(patient_world: World) -> World:
    """The shared world with counts of this test's own. Its Redis keeps what earlier tests left there."""
    return replace(patient_world, rows=set(), counted=patient_world.stats())


# --- values in Redis ------------------------------------------------------------------------------------------------


def damaged(harm: damage.Damage) -> Sabotage:
    """Damages the image's own value."""

    def sabotage(world: World, key: ContentKey) -> None:
        world.admin.set(data_key(key), harm(world.admin.get(data_key(key))))

    return sabotage


def of_another_image(world: World, key: ContentKey) -> None:
    """Stores another image's valid values under this image's keys."""
    names = [name for name in world.admin.scan_iter(b"*:e") if name != data_key(key)]
    world.admin.set(data_key(key), world.admin.get(names[0]) if names else b"nothing else is there")


def of_another_type(world: World, key: ContentKey) -> None:
    """Stores lists in place of strings."""
    for name in (data_key(key), metadata_key(key), lease_key(key)):
        world.admin.delete(name)
        world.admin.rpush(name, "a")


def endless_lease(world: World, key: ContentKey) -> None:
    """Removes the rows and plants a lease that has no holder and never expires."""
    world.admin.delete(data_key(key))
    world.admin.set(lease_key(key), "nobody")


DAMAGES = [
    *(damaged(damage.flip([(offset, 3)])) for offset in (0, 8, 10, 12, 44, 48, 52, 68, 72, 88, 104, 112, 3000, 4095)),
    *(damaged(damage.flip([(offset, 0)])) for offset in (4096, 4097, 5000, 6000, 8191)),
    *(damaged(damage.cut(offset)) for offset in (0, 1, 4095, 4096, 4097, 8191)),
    *(damaged(damage.zero(offset, length)) for offset, length in ((0, 4096), (112, 64), (4064, 32), (4096, 4096))),
    *(damaged(harm(offset, b"?")) for harm in (damage.insert, damage.overwrite) for offset in (0, 4096, 8000)),
    *(damaged(damage.remove(offset, 1)) for offset in (0, 100, 4096, 8000)),
    *(damaged(damage.extend(tail)) for tail in (b"\0", b"x" * 5000)),
    damaged(damage.reorder(2048, [1, 0])),
    damaged(lambda value: value + value),
    damaged(lambda value: b""),
    damaged(lambda value: b"hello"),
    of_another_image,
    of_another_type,
    endless_lease,
]


async def test_rows_are_right_with_any_damage_in_redis(world: World) -> None:
    for sabotage in DAMAGES:
        for cached in (Cached.REDIS, Cached.BOTH):
            await world.check(cached, sabotage)
    assert len(world.rows) >= 85
    assert world.reasons > {"header_seal", "block_seal", "wrong_key", "wrong_type", "length", "too_short", "absent"}


# --- replies of Redis -----------------------------------------------------------------------------------------------


def named(name: bytes) -> bytes:
    """Returns the bytes that a command of this name contains."""
    return b"$%d\r\n%b\r\n" % (len(name), name)


def damage_end(later: int, true: bytes) -> bytes:
    return damage.flip([(len(true) - 10, 0)])(true)


ABOUT = [b"", *(named(name) for name in b"GET GETRANGE STRLEN EXISTS SET PEXPIRE UNLINK INFO HELLO".split())]
TELLING = [
    *(
        always(b"-" + code + b" no\r\n")
        for code in b"NOPERM OOM READONLY WRONGTYPE ERR CLUSTERDOWN LOADING NOAUTH".split()
    ),
    always(b"-MOVED 1 127.0.0.1:1\r\n"),
    *(always(reply) for reply in (b"$-1\r\n", b":0\r\n", b":1\r\n", b"+OK\r\n", b"$5\r\nhello\r\n", b"*1\r\n:1\r\n")),
    *(always(reply) for reply in (b":%d\r\n" % 10**400, b"\x00\xff\r\n", b"*1\r\n" * 2000)),
    damage_end,
    changed(damage.cut(10)),
]


def lying(lie: Lie, *, to_encoder: bool, to_decoder: bool) -> Sabotage:
    def sabotage(world: World, key: ContentKey) -> None:
        if to_encoder:
            world.beside_encoder.lie(lie)
        if to_decoder:
            world.beside_decoder.lie(lie)

    return sabotage


async def test_rows_are_right_with_any_reply_of_redis(world: World) -> None:
    audiences = itertools.cycle([(True, False), (False, True), (True, True)])
    states = itertools.cycle([Cached.REDIS, Cached.NOWHERE, Cached.REDIS, Cached.BOTH])
    for about, tell in itertools.product(ABOUT, TELLING):
        to_encoder, to_decoder = next(audiences)
        after = After.CLOSE if tell is TELLING[-1] else After.GO_ON
        lie = Lie(0, tell, after, linger_s=0.05, about=about)
        await world.check(next(states), lying(lie, to_encoder=to_encoder, to_decoder=to_decoder))
    assert len(world.rows) >= 150
    assert world.reasons > {
        "noperm",
        "server_error",
        "wrong_type",
        "moved",
        "loading",
        "auth",
        "protocol",
        "closed",
    }


def lost_writes() -> Lie:
    """Reports every write as stored and drops it."""
    return Lie(0, always(b"+OK\r\n"), about=named(b"SET"), ask=lambda later, command: b"*1\r\n$4\r\nPING\r\n")


def busy_without_end() -> Lie:
    """Reports that another encoder holds the lease of every picture, for ever."""
    replies = itertools.cycle([b"$-1\r\n", b"$3\r\nhim\r\n", b":100000000000\r\n"])
    return Lie(0, lambda later, true: next(replies), about=b":l\r\n")


def unreadable_rows() -> Lie:
    """Lets the encoder find entries whose rows cannot be read."""
    return Lie(0, always(b"-ERR no\r\n"), about=b"$4\r\n4096\r\n")


def silence(about: bytes) -> Lie:
    return Lie(0, instead(b""), After.STALL, about=about)


@pytest.mark.parametrize("cached", Cached)
@pytest.mark.parametrize(
    "make_lie",
    [
        lost_writes,
        busy_without_end,
        unreadable_rows,
        pytest.param(lambda: silence(b""), id="silence"),
        pytest.param(lambda: silence(named(b"SET")), id="silence after SET"),
        pytest.param(lambda: silence(named(b"GETRANGE")), id="silence after GETRANGE"),
    ],
)
async def test_lies_over_several_commands_change_no_row(
    world: World, cached: Cached, make_lie: Callable[[], Lie]
) -> None:
    for to_decoder in (False, True):
        await world.check(cached, lying(make_lie(), to_encoder=True, to_decoder=to_decoder))


async def test_breakers_open_on_a_liar_and_the_rows_stay_right(folder: pathlib.Path) -> None:
    async with open_world(folder) as world:
        world.lie(Lie(0, always(b"?\r\n")))
        for picture in itertools.islice(world.pictures, 8):
            expected = await world.reference.fetch(picture, RowRange(0, NUM_ROWS))
            assert await world.decoder.fetch(picture, RowRange(0, NUM_ROWS)) == expected
        assert world.reasons == {"protocol", "breaker_open"}
        # The connection may be closed by now.
        for cached in Cached:
            await world.check(cached, lying(Lie(0, always(b"-ERR no\r\n")), to_encoder=True, to_decoder=True))
