"""Rows from where they are: Redis, the encoder, or the answer of the one replica that has them. All parts are real."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
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
from lookonce.errors import EmbeddingNotCachedError, InternalError, LookonceError
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import data_key
from lookonce.store.embedding_store import EmbeddingStore
from tests import image_files, tiny_models
from tests.decoder_svc.encoders import client, running_encoder

NUM_ROWS = 16
OPTIONS = ProcessorOptions()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@dataclass(frozen=True, slots=True)
class Fetcher:
    """A decoder's side of it, and what its metrics say."""

    fetcher: EmbeddingFetcher
    encoder: EncoderClient
    registry: CollectorRegistry

    async def fetch(
        self, picture: bytes, rows: RowRange, *, with_data: bool = True, num_image_rows: int = NUM_ROWS
    ) -> FetchedRows:
        """The rows, or the error as an exception."""
        data = picture if with_data else None
        fetch = RowFetch(await self.key(picture), rows, num_image_rows, OPTIONS, data, RequestId("r"))
        ended: asyncio.Future[FetchedRows] = asyncio.get_running_loop().create_future()

        def failed(_: RowFetch, error: LookonceError) -> None:
            ended.set_exception(error)

        self.fetcher.start(fetch, ended.set_result, failed)
        async with asyncio.timeout(60):
            return await ended

    async def key(self, picture: bytes) -> ContentKey:
        info = await self.encoder.info()
        return content_key(image_digest(picture), info.fingerprint, OPTIONS, DEFAULT_TENANT)

    def metric(self, name: str, tier: str) -> float:
        value = self.registry.get_sample_value(f"lookonce_decoder_embedding_fetch_{name}", {"tier": tier})
        assert value is not None
        return value


@asynccontextmanager
async def open_fetcher(target: str, redis_url: str | None, ttl_s: float = 600) -> AsyncIterator[Fetcher]:
    registry = CollectorRegistry()
    store = None if redis_url is None else EmbeddingStore(redis_url, 5, 600, 0)
    async with AsyncExitStack() as stack:
        if store is not None:
            stack.callback(store.close)
        encoder = await stack.enter_async_context(client(target))
        fetcher = EmbeddingFetcher(
            store, encoder, num_workers=2, timeout_s=30, ttl_s=ttl_s, metrics=FetchMetrics(registry)
        )
        stack.push_async_callback(fetcher.close)
        yield Fetcher(fetcher, encoder, registry)


def picture(seed: int) -> bytes:
    return image_files.encoded(image_files.noise(seed, 70, 60))


async def test_rows_come_from_the_encoder_first_and_from_redis_afterwards(
    folder: pathlib.Path, redis_server: EmbeddedRedis
) -> None:
    async with (
        running_encoder(folder, redis_url=redis_server.url) as target,
        open_fetcher(target, redis_server.url) as decoder,
    ):
        whole = await decoder.fetch(picture(1), RowRange(0, NUM_ROWS))
        part = await decoder.fetch(picture(1), RowRange(3, 9), with_data=False)
        row_bytes = len(whole.data) // NUM_ROWS
        assert (whole.num_encoded_rows, part.num_encoded_rows) == (NUM_ROWS, 0)
        assert part.data == whole.data[3 * row_bytes : 9 * row_bytes]
        assert (decoder.metric("rows_total", "encoder"), decoder.metric("rows_total", "shared")) == (NUM_ROWS, 6)
        assert decoder.metric("bytes_total", "shared") == 6 * row_bytes
        with pytest.raises(EmbeddingNotCachedError):
            await decoder.fetch(picture(2), RowRange(0, 1), with_data=False)
        assert decoder.registry.get_sample_value("lookonce_decoder_embedding_fetch_failed_total") == 1
        needed = decoder.registry.get_sample_value("lookonce_decoder_embedding_fetch_rows_needed_total")
        assert needed == NUM_ROWS + 6 + 1


async def test_one_of_many_fetches_of_an_image_brings_the_count_of_its_encode(
    folder: pathlib.Path, redis_server: EmbeddedRedis
) -> None:
    """Ranges of one image, fetched at once by two decoders from two encoders."""
    async with AsyncExitStack() as stack:
        url = redis_server.url
        targets = [await stack.enter_async_context(running_encoder(folder, redis_url=url)) for _ in range(2)]
        decoders = [await stack.enter_async_context(open_fetcher(f"ipv4:{','.join(targets)}", url)) for _ in range(2)]
        ranges = [RowRange(start, start + 4) for start in range(0, NUM_ROWS, 4)]
        for seed in range(5):
            found = await asyncio.gather(*(one.fetch(picture(seed), rows) for one in decoders for rows in ranges))
            assert sorted(rows.num_encoded_rows for rows in found) == [*[0] * 7, NUM_ROWS]


async def test_the_count_of_an_encode_whose_fetch_failed_comes_with_the_next_fetch(
    folder: pathlib.Path, redis_server: EmbeddedRedis
) -> None:
    async with (
        running_encoder(folder, redis_url=redis_server.url) as target,
        open_fetcher(target, redis_server.url) as decoder,
    ):
        with pytest.raises(InternalError, match="number of rows"):
            await decoder.fetch(picture(1), RowRange(0, 4), num_image_rows=NUM_ROWS + 1)
        found = [await decoder.fetch(picture(1), RowRange(0, 4)) for _ in range(2)]
        assert [rows.num_encoded_rows for rows in found] == [NUM_ROWS, 0]


@pytest.mark.parametrize("num_encoders", [1, 3])
async def test_without_redis_the_replica_that_encodes_gives_the_rows(
    folder: pathlib.Path, redis_server: EmbeddedRedis, num_encoders: int
) -> None:
    async with AsyncExitStack() as stack:
        targets = [
            await stack.enter_async_context(running_encoder(folder, redis_url=redis_server.url))
            for _ in range(num_encoders)
        ]
        together = f"ipv4:{','.join(targets)}"
        reference = await stack.enter_async_context(open_fetcher(targets[0], redis_server.url))
        expected = [await reference.fetch(picture(seed), RowRange(2, 12)) for seed in range(12)]
        url = redis_server.url
        redis_server.stop()
        decoder = await stack.enter_async_context(open_fetcher(together, url))
        found = await asyncio.gather(*(decoder.fetch(picture(seed), RowRange(2, 12)) for seed in range(12)))
        # Other replicas encode in other batches, which changes the last bits.
        for one, other in zip(expected, found, strict=True):
            a, b = (memoryview(rows.data).cast("f") for rows in (one, other))
            assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-4
        assert decoder.metric("rows_total", "encoder") == 120


async def test_reading_from_redis_extends_the_lifetime(folder: pathlib.Path, redis_server: EmbeddedRedis) -> None:
    async with (
        running_encoder(folder, redis_url=redis_server.url, ttl_s=500) as target,
        open_fetcher(target, redis_server.url) as first,
        open_fetcher(target, redis_server.url, ttl_s=0.4) as second,
    ):
        await first.fetch(picture(1), RowRange(0, NUM_ROWS))
        name = data_key(await first.key(picture(1)))
        with redis.Redis.from_url(redis_server.url) as admin:
            server: Any = admin
            server.pexpire(name, 20_000)
            await second.fetch(picture(1), RowRange(0, 4))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(15):
                    while server.pttl(name) <= 20_000:
                        await asyncio.sleep(0.02)
            assert 20_000 < server.pttl(name) <= 500_000
