"""Images are resolved to identity and size: bytes are hashed and measured; digests are looked up, never trusted."""

from __future__ import annotations

import asyncio
import pathlib
import types
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest

from decoder_svc.prompt.image_resolver import ImageResolver
from decoder_svc.prompt.preparation_threads import PreparationThreads
from decoder_svc.prompt.prompt_spec import CachedImage, ImageSource, InlineImage
from decoder_svc.rows.encoder_client import EncoderClient
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ImageDigest,
    ProcessorOptions,
    Tenant,
    content_key,
    image_digest,
)
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.errors import (
    DigestMismatchError,
    EmbeddingNotCachedError,
    FingerprintMismatchError,
    ImageTooLargeError,
    ImageUndecodableError,
    LookonceError,
    UnavailableError,
)
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.media.image_header import ImageLimits, probe_image
from lookonce.store.embedding_store import EmbeddingStore
from tests import heif_files, image_files
from tests.decoder_svc.encoders import client, running_encoder
from tests.lookonce.store.entries import write

NO_OPTIONS = ProcessorOptions()
LIMITS = ImageLimits(max_bytes=200_000, max_pixels=1_000_000, max_aspect=50)


def png(seed: int, width: int = 80, height: int = 60) -> bytes:
    return image_files.encoded(image_files.noise(seed, width, height))


def inline(data: bytes, digest: ImageDigest | None = None) -> InlineImage:
    return InlineImage(data, NO_OPTIONS, digest)


def cached(data: bytes, fingerprint: str | None = None) -> CachedImage:
    return CachedImage(image_digest(data), NO_OPTIONS, fingerprint)


def resolver(encoder: EncoderClient | None, store: EmbeddingStore | None = None) -> ImageResolver:
    return ImageResolver(encoder, store, LIMITS, PreparationThreads())


@pytest.fixture
async def encoder(model_folder: Callable[[str], pathlib.Path]) -> AsyncIterator[EncoderClient]:
    async with running_encoder(model_folder("llava_clip")) as target, client(target) as encoder:
        yield encoder


async def put(encoder: EncoderClient, data: bytes) -> None:
    key = content_key(image_digest(data), (await encoder.info()).fingerprint, NO_OPTIONS, DEFAULT_TENANT)
    await encoder.encode(key, data, NO_OPTIONS, 30)


async def test_bytes_give_key_and_upright_size(encoder: EncoderClient) -> None:
    sideways = image_files.oriented_jpeg(image_files.noise(1, 80, 60), 6)
    first, second = await resolver(encoder).resolve(
        [inline(png(1, 90, 40)), inline(sideways)], DEFAULT_TENANT, "request"
    )
    assert (first.width, first.height, first.data) == (90, 40, png(1, 90, 40))
    assert (second.width, second.height) == (60, 80)
    fingerprint = (await encoder.info()).fingerprint
    assert first.key == content_key(image_digest(png(1, 90, 40)), fingerprint, NO_OPTIONS, DEFAULT_TENANT)
    assert first.num_rows is None


async def test_a_phones_picture_has_its_upright_size(encoder: EncoderClient) -> None:
    item = heif_files.avif_item(image_files.noise(1, 80, 60), heif_files.rotation(3))
    data = heif_files.heif([item, heif_files.exif_item(6)], [(b"cdsc", 2, [1])])
    (image,) = await resolver(encoder).resolve([inline(data)], DEFAULT_TENANT, "one")
    assert (image.width, image.height) == (60, 80)
    await put(encoder, data)


async def test_pixels_count_as_the_encoder_counts_them(encoder: EncoderClient) -> None:
    costly = image_files.jpeg_of_many_scans(512, 512, 3800)
    sources: list[ImageSource] = [inline(data) for data in (png(1, 90, 40), costly)]
    images = await resolver(encoder).resolve(sources, DEFAULT_TENANT, "one")
    headers = [probe_image(data, LIMITS) for data in (png(1, 90, 40), costly)]
    assert [image.num_inline_pixels for image in images] == [header.num_pixels for header in headers]
    assert images[0].num_inline_pixels == 90 * 40 < images[1].num_inline_pixels


async def test_options_and_tenant_are_part_of_the_key(encoder: EncoderClient) -> None:
    sources: list[ImageSource] = [inline(png(1)), InlineImage(png(1), ProcessorOptions(5000))]
    plain, bounded = await resolver(encoder).resolve(sources, DEFAULT_TENANT, "one")
    (foreign,) = await resolver(encoder).resolve([inline(png(1))], Tenant("other", b"secret"), "one")
    assert len({plain.key, bounded.key, foreign.key}) == 3


async def test_a_digest_is_resolved_by_the_encoder(encoder: EncoderClient) -> None:
    await put(encoder, png(2, 100, 50))
    (image,) = await resolver(encoder).resolve([cached(png(2, 100, 50))], DEFAULT_TENANT, "one")
    assert (image.width, image.height, image.num_rows, image.data) == (100, 50, 16, None)


async def test_a_digest_is_resolved_by_the_shared_cache_when_the_encoder_is_gone(
    model_folder: Callable[[str], pathlib.Path],
) -> None:
    with EmbeddedRedis(64 << 20) as redis:
        store = EmbeddingStore(redis.url, 1.0, 3600, 0)
        async with running_encoder(model_folder("llava_clip"), redis_url=redis.url) as target:
            encoder = client(target)
            await put(encoder, png(3, 70, 30))
        (image,) = await resolver(encoder, store).resolve([cached(png(3, 70, 30))], DEFAULT_TENANT, "one")
        assert (image.width, image.height, image.num_rows) == (70, 30, 16)
        with pytest.raises(UnavailableError):
            await resolver(encoder, store).resolve([cached(b"other")], DEFAULT_TENANT, "one")
        await encoder.close()
        store.close()


async def test_without_redis_the_encoder_still_knows(encoder: EncoderClient) -> None:
    with EmbeddedRedis(64 << 20) as redis:
        store = EmbeddingStore(redis.url, 0.25, 3600, 0)
    await put(encoder, png(4))
    (image,) = await resolver(encoder, store).resolve([cached(png(4))], DEFAULT_TENANT, "one")
    assert image.num_rows == 16
    store.close()


async def test_all_unknown_digests_are_named_at_once(encoder: EncoderClient) -> None:
    await put(encoder, png(5))
    sources: list[ImageSource] = [cached(b"x"), cached(png(5)), cached(b"y"), inline(png(6)), cached(b"z")]
    with pytest.raises(EmbeddingNotCachedError) as caught:
        await resolver(encoder).resolve(sources, DEFAULT_TENANT, "one")
    assert caught.value.indexes == (0, 2, 4)


async def test_another_tenants_image_is_as_unknown_as_any(encoder: EncoderClient) -> None:
    with EmbeddedRedis(64 << 20) as redis:
        store = EmbeddingStore(redis.url, 1.0, 3600, 1 << 20)
        (mine,) = await resolver(encoder).resolve([inline(png(7))], DEFAULT_TENANT, "one")
        meta = (await encoder.encode(mine.key, png(7), NO_OPTIONS, 30)).meta
        assert write(store, mine.key, meta, memoryview(bytes(meta.size_bytes)))
        assert await resolver(encoder, store).resolve([cached(png(7))], DEFAULT_TENANT, "one")
        key = content_key(image_digest(png(7)), mine.key.fingerprint, NO_OPTIONS, Tenant("other", b"secret"))
        assert store.metadata(key) is None
        store.close()


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (inline(b"no image"), ImageUndecodableError),
        (inline(b""), ImageUndecodableError),
        (inline(bytes(200_001)), ImageTooLargeError),
        (inline(image_files.png_of_size(2000, 2000)), ImageTooLargeError),
        (inline(png(8), image_digest(b"another")), DigestMismatchError),
    ],
)
async def test_a_bad_image_is_refused_with_reason_and_position(
    encoder: EncoderClient, bad: InlineImage, kind: type[LookonceError]
) -> None:
    with pytest.raises(kind) as caught:
        await resolver(encoder).resolve([inline(png(9)), cached(b"unknown"), bad], DEFAULT_TENANT, "one")
    assert caught.value.metadata["index"] == "2"
    assert await resolver(encoder).resolve([inline(png(9))], DEFAULT_TENANT, "one")


async def test_the_right_expected_digest_passes(encoder: EncoderClient) -> None:
    assert await resolver(encoder).resolve([inline(png(8), image_digest(png(8)))], DEFAULT_TENANT, "one")


async def test_a_reference_to_another_encoders_rows_is_refused(encoder: EncoderClient) -> None:
    await put(encoder, png(10))
    own = (await encoder.info()).fingerprint
    assert await resolver(encoder).resolve([cached(png(10), own)], DEFAULT_TENANT, "one")
    with pytest.raises(FingerprintMismatchError):
        await resolver(encoder).resolve([cached(png(10), "0" * 64)], DEFAULT_TENANT, "one")


async def test_without_encoder_only_prompts_without_images_are_served() -> None:
    assert await resolver(None).resolve([], DEFAULT_TENANT, "one") == []
    with pytest.raises(UnavailableError, match="no encoder"):
        await resolver(None).resolve([inline(png(1))], DEFAULT_TENANT, "one")


class CountingEncoder:
    """A stand-in for the client of an encoder that knows no image. Notes its calls, which wait for `gate`."""

    def __init__(self) -> None:
        # The tenant tag, the digests and the options of each call.
        self.calls: list[tuple[str, list[ImageDigest], ProcessorOptions]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.known: dict[ImageDigest, EmbeddingMeta] = {}

    async def info(self) -> Any:
        return types.SimpleNamespace(fingerprint=EncoderFingerprint("f"))

    async def lookup(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> list[EmbeddingMeta | None]:
        digests = [key.digest for key in keys]
        self.calls.append((keys[0].tenant_tag, digests, options))
        await self.gate.wait()
        return [self.known.get(digest) for digest in digests]


class CountingCache:
    """A stand-in for the shared cache. Notes the digests of its look-ups."""

    def __init__(self, *known: ImageDigest) -> None:
        self.calls: list[list[ImageDigest]] = []
        self.known = known

    def metadata_of(self, keys: Sequence[ContentKey]) -> list[EmbeddingMeta | None]:
        self.calls.append([key.digest for key in keys])
        return [META if key.digest in self.known else None for key in keys]


META = EmbeddingMeta(16, 64, 0, RowDtype.FLOAT32, 80, 60)


def counting(encoder: CountingEncoder, cache: CountingCache | None = None) -> ImageResolver:
    return ImageResolver(cast(EncoderClient, encoder), cache, LIMITS, PreparationThreads())


def names(prefix: str, number: int) -> list[ImageDigest]:
    return [image_digest(f"{prefix} {index}".encode()) for index in range(number)]


def references(digests: Sequence[ImageDigest], options: ProcessorOptions = NO_OPTIONS) -> list[ImageSource]:
    return [CachedImage(digest, options) for digest in digests]


async def test_the_digests_of_a_prompt_are_looked_up_together() -> None:
    encoder, digests = CountingEncoder(), names("a", 128)
    cache = CountingCache(*digests[:5])
    with pytest.raises(EmbeddingNotCachedError) as caught:
        await counting(encoder, cache).resolve(references(digests), DEFAULT_TENANT, "one")
    assert caught.value.indexes == tuple(range(5, 128))
    assert cache.calls == [digests[start : start + 16] for start in range(0, 128, 16)]
    assert encoder.calls == [(DEFAULT_TENANT.tag, digests[5:], NO_OPTIONS)]


async def test_what_the_shared_cache_knows_costs_no_call() -> None:
    encoder, digests = CountingEncoder(), names("a", 40)
    images = await counting(encoder, CountingCache(*digests)).resolve(references(digests), DEFAULT_TENANT, "one")
    assert [image.key.digest for image in images] == digests
    assert encoder.calls == []


async def test_one_call_asks_for_digests_with_equal_options_and_for_at_most_256() -> None:
    encoder, digests = CountingEncoder(), names("a", 600)
    small = ProcessorOptions(5000)
    sources = [source for digest in digests for source in references([digest], small) + references([digest])]
    with pytest.raises(EmbeddingNotCachedError):
        await counting(encoder).resolve(sources, DEFAULT_TENANT, "one")
    expected = [
        (options, digests[start : start + 256]) for options in (small, NO_OPTIONS) for start in range(0, 600, 256)
    ]
    assert [(options, asked) for _, asked, options in encoder.calls] == expected


async def test_a_digest_that_occurs_several_times_is_looked_up_once() -> None:
    encoder = CountingEncoder()
    first, second = names("a", 2)
    encoder.known = {first: META}
    cache = CountingCache()
    sources = references([first, second, first, second, first])
    with pytest.raises(EmbeddingNotCachedError) as caught:
        await counting(encoder, cache).resolve(sources, DEFAULT_TENANT, "one")
    assert caught.value.indexes == (1, 3)
    assert cache.calls == [[first, second]] == [asked for _, asked, _ in encoder.calls]
    images = await counting(encoder).resolve(references([first] * 3), DEFAULT_TENANT, "one")
    assert [image.num_rows for image in images] == [16] * 3


async def test_files_and_digests_keep_their_positions() -> None:
    encoder, digests = CountingEncoder(), names("a", 20)
    encoder.known = dict.fromkeys(digests[10:], META)
    sources = [source for digest in digests for source in (inline(png(1)), *references([digest]))]
    images = await counting(encoder, CountingCache(*digests[:10])).resolve(sources, DEFAULT_TENANT, "one")
    assert [image.key.digest for image in images[1::2]] == digests
    assert {image.key.digest for image in images[::2]} == {image_digest(png(1))}
    assert [image.data is None for image in images] == [False, True] * 20


async def test_the_first_error_counts_wherever_it_comes_from() -> None:
    class Failing(CountingEncoder):
        async def lookup(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> list[EmbeddingMeta | None]:
            raise UnavailableError("not there")

    encoder, unknown = Failing(), names("a", 20)
    strange = CachedImage(image_digest(b"strange"), NO_OPTIONS, "0" * 64)
    bad = inline(b"no image")
    known = image_digest(b"known")
    for sources, kind in [
        ([*references([known]), *references(unknown), strange, bad], UnavailableError),
        ([*references([known]), strange, *references(unknown), bad], FingerprintMismatchError),
        ([bad, strange, *references(unknown)], ImageUndecodableError),
    ]:
        with pytest.raises(kind):
            await counting(encoder, CountingCache(known)).resolve(sources, DEFAULT_TENANT, "one")


async def test_a_flood_of_digests_makes_few_tasks_and_takes_few_passes() -> None:
    encoder, cache = CountingEncoder(), CountingCache()
    resolving = counting(encoder, cache)
    loop = asyncio.get_running_loop()
    num_tasks = 0

    def count(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal num_tasks
        num_tasks += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    async def ask(number: int) -> None:
        with pytest.raises(EmbeddingNotCachedError):
            await resolving.resolve(references(names(str(number), 128)), Tenant("a", b"one"), str(number))

    loop.set_task_factory(count)
    try:
        await asyncio.gather(*(ask(number) for number in range(40)))
    finally:
        loop.set_task_factory(None)
    assert num_tasks <= 3 * 40
    assert (len(cache.calls), len(encoder.calls)) == (40 * 8, 40)


async def test_few_calls_look_up_digests_at_a_time_and_tenants_take_turns() -> None:
    encoder = CountingEncoder()
    encoder.gate.clear()
    resolving = counting(encoder)

    async def ask(tenant: Tenant, name: str, num_images: int) -> None:
        with pytest.raises(EmbeddingNotCachedError):
            await resolving.resolve(references(names(name, num_images)), tenant, name)

    many = [asyncio.create_task(ask(Tenant("a", b"one"), str(number), 128)) for number in range(60)]
    for _ in range(2000):
        await asyncio.sleep(0)
    assert len(encoder.calls) == 16
    small = asyncio.create_task(ask(Tenant("b", b"two"), "small", 1))
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(encoder.calls) == 16
    encoder.gate.set()
    await small
    assert len(encoder.calls) < 40
    await asyncio.gather(*many)
    assert len(encoder.calls) == 60 + 1


async def test_a_call_that_leaves_gives_up_its_look_ups() -> None:
    encoder, cache = CountingEncoder(), CountingCache()
    encoder.gate.clear()
    resolving = counting(encoder, cache)

    async def ask(name: str) -> None:
        with pytest.raises(EmbeddingNotCachedError):
            await resolving.resolve(references(names(name, 100)), DEFAULT_TENANT, name)

    calls = [asyncio.create_task(ask(str(number))) for number in range(60)]
    async with asyncio.timeout(30):
        while len(encoder.calls) < 16:
            await asyncio.sleep(0.001)
    for call in calls:
        call.cancel()
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*calls, return_exceptions=True))
    encoder.gate.set()
    async with asyncio.timeout(30):
        await ask("last")
    assert encoder.calls[-1][1] == names("last", 100)
