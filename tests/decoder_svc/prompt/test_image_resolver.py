"""Images are resolved to identity and size: bytes are hashed and measured; digests are looked up, never trusted."""

from __future__ import annotations

import asyncio
import pathlib
import types
from collections.abc import AsyncIterator, Callable
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


async def test_few_digests_are_looked_up_at_a_time_and_tenants_take_turns() -> None:
    asked: list[str] = []
    gate = asyncio.Event()

    class Encoder:
        async def info(self) -> Any:
            return types.SimpleNamespace(fingerprint=EncoderFingerprint("f"))

        async def lookup(self, key: ContentKey, options: ProcessorOptions) -> None:
            asked.append(key.tenant_tag)
            await gate.wait()

    resolving = resolver(cast(EncoderClient, Encoder()))

    async def ask(tenant: Tenant, name: str, num_images: int) -> None:
        sources = [cached(f"{name} {index}".encode()) for index in range(num_images)]
        with pytest.raises(EmbeddingNotCachedError):
            await resolving.resolve(sources, tenant, name)

    many = [asyncio.create_task(ask(Tenant("a", b"one"), str(number), 128)) for number in range(20)]
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(asked) == 16
    small = asyncio.create_task(ask(Tenant("b", b"two"), "small", 1))
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(asked) == 16
    gate.set()
    await small
    assert len(asked) < 100
    await asyncio.gather(*many)
    assert len(asked) == 20 * 128 + 1
