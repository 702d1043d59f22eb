"""The client of the encoder: against the real service, and against ones that answer wrongly or not at all."""

from __future__ import annotations

import asyncio
import pathlib
import re
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder_svc.rows.encoder_client import EncodedImage, EncoderClient
from decoder_svc.rows.encoder_info import ExpectedRows
from lookonce import errors
from lookonce.common.v1 import common_pb2
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderServiceServicer
from lookonce.identity import CallerRole, Identity, acting_for
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.server.admission.authentication import parse_token
from lookonce.server.watched_files import WatchedFiles
from lookonce.tenants import Tenants
from tests import image_files
from tests.decoder_svc.encoders import CHANNEL, client, running_encoder, scripted_encoder
from tests.garbled_service import garbled_service

NO_OPTIONS = ProcessorOptions()
FINGERPRINT = EncoderFingerprint("f" * 64)
INTERNALS = re.compile(r"127\.0\.0\.1|ipv4|unix:|0x[0-9a-f]{6,}|Traceback|\.py\b|secret")


def png(seed: int, width: int = 80, height: int = 60) -> bytes:
    return image_files.encoded(image_files.noise(seed, width, height))


async def key_of(encoder: EncoderClient, data: bytes, options: ProcessorOptions = NO_OPTIONS) -> ContentKey:
    return content_key(image_digest(data), (await encoder.info()).fingerprint, options, DEFAULT_TENANT)


async def rows_of(
    encoder: EncoderClient, key: ContentKey, start: int, stop: int, options: ProcessorOptions = NO_OPTIONS
) -> bytes:
    buffer = bytearray((stop - start) * (await encoder.info()).row_bytes)
    await encoder.read_rows(key, start, stop, memoryview(buffer), 10, options=options)
    return bytes(buffer)


# Against the real service.


@pytest.fixture
async def real(model_folder: Callable[[str], pathlib.Path]) -> AsyncIterator[EncoderClient]:
    async with running_encoder(model_folder("llava_clip")) as target, client(target) as encoder:
        yield encoder


async def test_info_describes_the_served_model(real: EncoderClient) -> None:
    info = await real.info()
    assert (info.model_type, info.hidden_size, info.num_levels, info.dtype) == ("llava", 64, 0, RowDtype.FLOAT32)
    assert info.row_bytes == 256
    assert re.fullmatch("[0-9a-f]{64}", info.fingerprint)


async def test_an_image_is_encoded_once_then_found_and_its_rows_can_be_read(real: EncoderClient) -> None:
    data = png(1)
    key = await key_of(real, data)
    meta = EmbeddingMeta(16, 64, 0, RowDtype.FLOAT32, 80, 60)
    first = await real.encode(key, data, NO_OPTIONS, 30)
    whole = await rows_of(real, key, 0, 16)
    assert first == EncodedImage(meta, stored=False, was_computed=True, rows=whole)
    found = EncodedImage(meta, stored=False, was_computed=False, rows=whole)
    assert await real.encode(key, data, NO_OPTIONS, 30) == found
    assert await real.encode(key, None, NO_OPTIONS, 30) == found
    assert len(set(whole)) > 100
    assert await rows_of(real, key, 3, 5) == whole[3 * 256 : 5 * 256]


async def test_one_of_many_calls_for_an_image_is_told_that_it_was_computed(real: EncoderClient) -> None:
    data = png(3)
    key = await key_of(real, data)
    encoded = await asyncio.gather(*(real.encode(key, data, NO_OPTIONS, 30) for _ in range(10)))
    assert [one.was_computed for one in encoded].count(True) == 1


async def test_stored_rows_are_said_to_be_stored(model_folder: Callable[[str], pathlib.Path]) -> None:
    with EmbeddedRedis(64 << 20) as redis:
        async with (
            running_encoder(model_folder("llava_clip"), redis_url=redis.url) as target,
            client(target) as encoder,
        ):
            data = png(2)
            encoded = await encoder.encode(await key_of(encoder, data), data, NO_OPTIONS, 30)
            assert encoded.stored
            assert encoded.rows is None, "they are read where they are stored"


async def test_lookup_never_encodes(real: EncoderClient) -> None:
    data = png(3)
    key = await key_of(real, data)
    assert await real.lookup([key], NO_OPTIONS) == [None]
    with pytest.raises(errors.EmbeddingNotCachedError):
        await real.encode(key, None, NO_OPTIONS, 30)
    with pytest.raises(errors.EmbeddingNotCachedError):
        await rows_of(real, key, 0, 16)
    encoded = await real.encode(key, data, NO_OPTIONS, 30)
    assert await real.lookup([key], NO_OPTIONS) == [encoded.meta]
    other = await key_of(real, png(4))
    assert await real.lookup([other, key, other], NO_OPTIONS) == [None, encoded.meta, None]


async def test_processor_options_are_part_of_every_call(model_folder: Callable[[str], pathlib.Path]) -> None:
    small = ProcessorOptions(8 * 28 * 28)
    async with (
        running_encoder(model_folder("qwen2_vl")) as target,
        client(target, "qwen2_vl") as encoder,
    ):
        data = png(4, 300, 300)
        default_key, small_key = await key_of(encoder, data), await key_of(encoder, data, small)
        default = await encoder.encode(default_key, data, NO_OPTIONS, 30)
        assert await encoder.lookup([small_key], small) == [None]
        bounded = await encoder.encode(small_key, data, small, 30)
        assert bounded.meta.num_rows < default.meta.num_rows
        assert await encoder.lookup([small_key], small) == [bounded.meta]
        await rows_of(encoder, small_key, 0, bounded.meta.num_rows, small)
        await rows_of(encoder, default_key, 0, default.meta.num_rows)
        too_wide = memoryview(bytearray(default.meta.row_bytes + 1))
        with pytest.raises(errors.UnavailableError, match="shape"):
            await encoder.read_rows(default_key, 0, 1, too_wide, 10, options=NO_OPTIONS)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"no image", errors.ImageUndecodableError),
        (png(5)[:200], errors.ImageUndecodableError),
        (image_files.png_of_size(40_000, 40_000), errors.ImageTooLargeError),
    ],
)
async def test_an_error_about_an_image_keeps_its_type(
    real: EncoderClient, data: bytes, kind: type[errors.LookonceError]
) -> None:
    with pytest.raises(kind) as caught:
        await real.encode(await key_of(real, data), data, NO_OPTIONS, 30)
    assert "index" not in caught.value.metadata
    assert not INTERNALS.search(caught.value.message)


async def test_an_image_over_the_message_limit_is_too_large(real: EncoderClient) -> None:
    data = bytes(2 << 20)
    with pytest.raises(errors.ImageTooLargeError, match="limit"):
        await real.encode(await key_of(real, data), data, NO_OPTIONS, 30)


async def test_an_option_that_the_model_lacks_is_named_as_the_caller_knows_it(real: EncoderClient) -> None:
    options = ProcessorOptions(5000)
    data = png(6)
    with pytest.raises(errors.InvalidParameterError) as caught:
        await real.encode(await key_of(real, data, options), data, options, 30)
    assert caught.value.field == "max_pixels"


@pytest.mark.parametrize(
    ("model_type", "hidden_size", "num_levels"), [("qwen2_vl", 64, 0), ("llava", 65, 0), ("llava", 64, 3)]
)
async def test_rows_of_another_model_are_refused(
    model_folder: Callable[[str], pathlib.Path], model_type: str, hidden_size: int, num_levels: int
) -> None:
    async with (
        running_encoder(model_folder("llava_clip")) as target,
        client(target, model_type, hidden_size, num_levels) as encoder,
    ):
        with pytest.raises(errors.FingerprintMismatchError, match="llava of width 64"):
            await encoder.info()


# Against encoders that answer wrongly or not at all.


class Scripted(EncoderServiceServicer):
    """Serves one image of 8 rows, 2 rows per chunk; tests override what goes wrong."""

    fingerprint: str = FINGERPRINT

    def info(self) -> pb.GetEncoderInfoResponse:
        return pb.GetEncoderInfoResponse(
            encoder_fingerprint=self.fingerprint,
            hidden_size=64,
            dtype=common_pb2.DATA_TYPE_FLOAT32,
            model_type="llava",
            tenant_tag=DEFAULT_TENANT.tag,
        )

    def embedding(self, key: common_pb2.ContentKey) -> common_pb2.EmbeddingInfo:
        return common_pb2.EmbeddingInfo(
            key=key,
            num_rows=8,
            hidden_size=64,
            dtype=common_pb2.DATA_TYPE_FLOAT32,
            size_bytes=8 * 256,
            image_width=10,
            image_height=10,
        )

    def chunks(self, request: pb.ReadEmbeddingRequest) -> list[pb.ReadEmbeddingResponse]:
        stop = request.row_offset + request.row_count
        starts = range(request.row_offset, stop, 2)
        chunks = [
            pb.ReadEmbeddingResponse(row_offset=at, data=ROWS[at * 256 : min(at + 2, stop) * 256]) for at in starts
        ]
        chunks[0].embedding.CopyFrom(self.embedding(request.key))
        return chunks

    def results(self, request: pb.EncodeRequest) -> list[pb.EncodeResult]:
        key = common_pb2.ContentKey(
            digest=image_digest(request.items[0].image.data), encoder_fingerprint=request.expected_encoder_fingerprint
        )
        return [pb.EncodeResult(embedding=self.embedding(key))]

    async def GetEncoderInfo(self, request: Any, context: Any) -> pb.GetEncoderInfoResponse:
        return self.info()

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        return pb.EncodeResponse(results=self.results(request))

    async def EncodeStream(self, requests: Any, context: Any) -> AsyncIterator[pb.EncodeStreamResponse]:
        async for request in requests:
            yield pb.EncodeStreamResponse(item_id=request.item_id)

    async def LookupEmbeddings(self, request: Any, context: Any) -> pb.LookupEmbeddingsResponse:
        return pb.LookupEmbeddingsResponse()

    async def ReadEmbedding(self, request: Any, context: Any) -> AsyncIterator[pb.ReadEmbeddingResponse]:
        for chunk in self.chunks(request):
            yield chunk


ROWS = np.random.default_rng(0).bytes(8 * 256)


class Replaced(Scripted):
    """Says one fingerprint the first time and serves another one."""

    def __init__(self, first: str) -> None:
        self.said = iter([first])

    def info(self) -> pb.GetEncoderInfoResponse:
        response = super().info()
        response.encoder_fingerprint = next(self.said, FINGERPRINT)
        return response

    def results(self, request: pb.EncodeRequest) -> list[pb.EncodeResult]:
        if request.expected_encoder_fingerprint != FINGERPRINT:
            raise errors.FingerprintMismatchError("another fingerprint is served here")
        return super().results(request)


async def test_after_the_encoder_refused_the_fingerprint_it_is_asked_again() -> None:
    async with scripted_encoder(Replaced("0" * 64)) as target, client(target) as encoder:
        old_key = await key_of(encoder, b"a")
        assert old_key.fingerprint == (await encoder.info()).fingerprint == "0" * 64
        with pytest.raises(errors.FingerprintMismatchError):
            await encoder.encode(old_key, b"a", NO_OPTIONS, 30)
        assert (await encoder.info()).fingerprint == FINGERPRINT
        await encoder.encode(await key_of(encoder, b"a"), b"a", NO_OPTIONS, 30)


KEY = content_key(image_digest(b"a"), FINGERPRINT, NO_OPTIONS, DEFAULT_TENANT)


async def test_rows_arrive_in_chunks_of_any_size() -> None:
    async with scripted_encoder(Scripted()) as target, client(target) as encoder:
        for start, stop in [(0, 8), (1, 2), (3, 8), (0, 7)]:
            assert await rows_of(encoder, KEY, start, stop) == ROWS[start * 256 : stop * 256]


def drop(index: int) -> Callable[[list[Any]], list[Any]]:
    return lambda chunks: chunks[:index] + chunks[index + 1 :]


def change(index: int, **fields: Any) -> Callable[[list[Any]], list[Any]]:
    def changed(chunks: list[Any]) -> list[Any]:
        for name, value in fields.items():
            setattr(chunks[index], name, value)
        return chunks

    return changed


def describe(**fields: Any) -> Callable[[list[Any]], list[Any]]:
    def described(chunks: list[Any]) -> list[Any]:
        for name, value in fields.items():
            setattr(chunks[0].embedding, name, value)
        return chunks

    return described


def other_key(**fields: Any) -> Callable[[list[Any]], list[Any]]:
    def changed(chunks: list[Any]) -> list[Any]:
        for name, value in fields.items():
            setattr(chunks[0].embedding.key, name, value)
        return chunks

    return changed


WRONG_STREAMS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "nothing": lambda chunks: [],
    "first chunk missing": drop(0),
    "gap": drop(1),
    "end missing": drop(3),
    "repeat": lambda chunks: [chunks[0], *chunks],
    "backwards": lambda chunks: [chunks[0], *chunks[:0:-1]],
    "half a row": change(1, data=bytes(100)),
    "too much": change(3, data=bytes(3 * 256)),
    "another offset": change(2, row_offset=5),
    "another digest": other_key(digest=bytes(32)),
    "another encoder": other_key(encoder_fingerprint="e" * 64),
    "fewer rows": describe(num_rows=7),
    "wider rows": describe(size_bytes=8 * 512),
}


@pytest.mark.parametrize("spoil", WRONG_STREAMS.values(), ids=WRONG_STREAMS.keys())
async def test_a_wrong_stream_of_rows_is_never_taken(spoil: Callable[[list[Any]], list[Any]]) -> None:
    class Spoilt(Scripted):
        def chunks(self, request: pb.ReadEmbeddingRequest) -> list[pb.ReadEmbeddingResponse]:
            return spoil(super().chunks(request))

    async with scripted_encoder(Spoilt()) as target, client(target) as encoder:
        with pytest.raises(errors.UnavailableError, match="encoder service"):
            await rows_of(encoder, KEY, 0, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": bytes(32), "encoder_fingerprint": FINGERPRINT},
        {"digest": KEY.digest, "encoder_fingerprint": "e" * 64},
        None,
    ],
)
async def test_an_answer_for_another_image_is_never_taken(wrong: dict[str, Any] | None) -> None:
    class Confused(Scripted):
        def results(self, request: pb.EncodeRequest) -> list[pb.EncodeResult]:
            key = None if wrong is None else common_pb2.ContentKey(**wrong)
            return [] if key is None else [pb.EncodeResult(embedding=self.embedding(key))]

    async with scripted_encoder(Confused()) as target, client(target) as encoder:
        with pytest.raises(errors.UnavailableError):
            await encoder.encode(KEY, b"a", NO_OPTIONS, 10)


async def test_an_encoder_with_another_tenant_secret_is_refused() -> None:
    class Foreign(Scripted):
        def info(self) -> pb.GetEncoderInfoResponse:
            response = super().info()
            response.tenant_tag = Tenants(bytes(32)).default.tag
            return response

    async with scripted_encoder(Foreign()) as target, client(target) as encoder:
        with pytest.raises(errors.FingerprintMismatchError, match="tenant_secret_file"):
            await encoder.info()


async def test_an_unknown_element_type_is_refused() -> None:
    class Exotic(Scripted):
        def info(self) -> pb.GetEncoderInfoResponse:
            response = super().info()
            response.dtype = common_pb2.DATA_TYPE_UNSPECIFIED
            return response

    async with scripted_encoder(Exotic()) as target, client(target) as encoder:
        with pytest.raises(errors.UnavailableError, match="element type"):
            await encoder.info()


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (errors.OverloadedError("full", retry_after_s=2.5), errors.OverloadedError),
        (errors.ImageDecodeLimitError("slow"), errors.ImageDecodeLimitError),
        (errors.UnavailableError("drains"), errors.UnavailableError),
        (errors.DeadlineError("late"), errors.UnavailableError),
        (errors.AbortedError("gone"), errors.UnavailableError),
        (ValueError("secret 0x7f0000000000"), errors.InternalError),
    ],
)
async def test_errors_of_the_encoder_are_passed_on_with_their_status(
    failure: Exception, kind: type[errors.LookonceError]
) -> None:
    class Failing(Scripted):
        def results(self, request: pb.EncodeRequest) -> list[pb.EncodeResult]:
            raise failure

    async with scripted_encoder(Failing()) as target, client(target) as encoder:
        with pytest.raises(kind) as caught:
            await encoder.encode(KEY, b"a", NO_OPTIONS, 10)
        assert type(caught.value) is kind
        assert not INTERNALS.search(caught.value.message)
        if isinstance(caught.value, errors.OverloadedError):
            assert caught.value.retry_after_s == 2.5


async def test_an_unreachable_encoder_is_unavailable_and_shows_no_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with client(f"127.0.0.1:{unused.getsockname()[1]}") as encoder:
            for call in (
                encoder.info(),
                encoder.encode(KEY, b"a", NO_OPTIONS, 5),
                encoder.lookup([KEY], NO_OPTIONS),
                encoder.read_rows(KEY, 0, 1, memoryview(bytearray(256)), 5, options=NO_OPTIONS),
            ):
                with pytest.raises(errors.UnavailableError) as caught:
                    await call
                assert not INTERNALS.search(caught.value.message)


async def test_an_encoder_whose_replies_cannot_be_parsed_is_unavailable() -> None:
    service = pb.DESCRIPTOR.services_by_name["EncoderService"]
    async with garbled_service(service) as target, client(target) as encoder:
        for call in (
            encoder.info(),
            encoder.encode(KEY, b"a", NO_OPTIONS, 5),
            encoder.lookup([KEY], NO_OPTIONS),
            encoder.touch([KEY], NO_OPTIONS),
            encoder.read_rows(KEY, 0, 1, memoryview(bytearray(256)), 5, options=NO_OPTIONS),
        ):
            with pytest.raises(errors.UnavailableError, match="the encoder service sent a reply that cannot be read"):
                await call


async def test_a_silent_encoder_is_unavailable_when_the_time_is_over() -> None:
    class Silent(Scripted):
        async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
            await asyncio.sleep(3600)
            raise AssertionError

        async def ReadEmbedding(self, request: Any, context: Any) -> AsyncIterator[pb.ReadEmbeddingResponse]:
            yield self.chunks(request)[0]
            await asyncio.sleep(3600)

    async with scripted_encoder(Silent()) as target, client(target) as encoder:
        with pytest.raises(errors.UnavailableError, match=r"0\.2 s"):
            await encoder.encode(KEY, b"a", NO_OPTIONS, 0.2)
        with pytest.raises(errors.UnavailableError, match=r"0\.2 s"):
            await encoder.read_rows(KEY, 0, 8, memoryview(bytearray(8 * 256)), 0.2, options=NO_OPTIONS)


class Knowing(Scripted):
    """Answers look-ups with results that a test chooses."""

    def __init__(self, results: list[pb.LookupResult]) -> None:
        self.results_of_lookup = results

    async def LookupEmbeddings(self, request: Any, context: Any) -> pb.LookupEmbeddingsResponse:
        return pb.LookupEmbeddingsResponse(results=self.results_of_lookup)


def known(digest: bytes, fingerprint: str = FINGERPRINT) -> pb.LookupResult:
    key = common_pb2.ContentKey(digest=digest, encoder_fingerprint=fingerprint)
    return pb.LookupResult(cached=True, embedding=Scripted().embedding(key))


SECOND = content_key(image_digest(b"second"), FINGERPRINT, NO_OPTIONS, DEFAULT_TENANT)


@pytest.mark.parametrize(
    "results",
    [
        [known(KEY.digest)],
        [known(KEY.digest), known(SECOND.digest), known(SECOND.digest)],
        [],
        [known(SECOND.digest), known(KEY.digest)],
        [known(KEY.digest), known(KEY.digest)],
        [pb.LookupResult(), known(KEY.digest)],
        [known(KEY.digest), known(SECOND.digest, "0" * 64)],
        [known(KEY.digest), pb.LookupResult(cached=True)],
    ],
    ids=["too few", "too many", "none", "swapped", "twice", "in a wrong place", "another encoder", "without a key"],
)
async def test_look_ups_whose_results_are_not_those_of_the_keys_are_never_taken(results: list[pb.LookupResult]) -> None:
    async with scripted_encoder(Knowing(results)) as target, client(target) as encoder:
        with pytest.raises(errors.UnavailableError):
            await encoder.lookup([KEY, SECOND], NO_OPTIONS)


async def test_look_ups_have_the_order_of_the_keys() -> None:
    results = [pb.LookupResult(), known(KEY.digest), known(SECOND.digest)]
    third = content_key(image_digest(b"third"), FINGERPRINT, NO_OPTIONS, DEFAULT_TENANT)
    async with scripted_encoder(Knowing(results)) as target, client(target) as encoder:
        found = await encoder.lookup([third, KEY, SECOND], NO_OPTIONS)
    assert [None if meta is None else meta.num_rows for meta in found] == [None, 8, 8]


async def test_concurrent_callers_ask_for_info_once() -> None:
    class Counting(Scripted):
        num_calls = 0

        async def GetEncoderInfo(self, request: Any, context: Any) -> pb.GetEncoderInfoResponse:
            self.num_calls += 1
            await asyncio.sleep(0.05)
            return self.info()

    servicer = Counting()
    async with scripted_encoder(servicer) as target, client(target) as encoder:
        first = asyncio.create_task(encoder.info())
        others = [asyncio.create_task(encoder.info()) for _ in range(5)]
        await asyncio.sleep(0)
        first.cancel()
        assert {(await task).fingerprint for task in others} == {FINGERPRINT}
        assert servicer.num_calls <= 2


async def test_simultaneous_callers_of_a_silent_encoder_fail_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Scripted):
        num_calls = 0
        is_silent = False

        async def GetEncoderInfo(self, request: Any, context: Any) -> pb.GetEncoderInfoResponse:
            self.num_calls += 1
            if self.is_silent:
                await asyncio.sleep(3600)
            return self.info()

    servicer = Silent()
    async with scripted_encoder(servicer) as target, client(target) as encoder:
        # Connected from here on: only the answer can take time.
        await encoder.info()
        encoder._info, servicer.num_calls, servicer.is_silent = None, 0, True
        monkeypatch.setattr("decoder_svc.rows.encoder_client._INFO_TIMEOUT_S", 0.5)
        found = await asyncio.gather(*(encoder.info() for _ in range(50)), return_exceptions=True)
        assert {type(error) for error in found} == {errors.UnavailableError}
        assert servicer.num_calls == 1
        with pytest.raises(errors.UnavailableError):
            await encoder.info()
        assert servicer.num_calls == 2


async def test_the_buffer_must_fit_the_rows() -> None:
    async with client("127.0.0.1:1") as encoder:
        for start, stop, size in [(0, 3, 256), (2, 2, 0), (3, 2, 256)]:
            with pytest.raises(ValueError, match="rows"):
                await encoder.read_rows(KEY, start, stop, memoryview(bytearray(size)), 1, options=NO_OPTIONS)


class Noting(Scripted):
    """Keeps the metadata of calls about images."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        self.seen.append(dict(context.invocation_metadata()))
        return await super().Encode(request, context)

    async def LookupEmbeddings(self, request: Any, context: Any) -> pb.LookupEmbeddingsResponse:
        self.seen.append(dict(context.invocation_metadata()))
        return pb.LookupEmbeddingsResponse(results=[pb.LookupResult()] * len(request.keys))

    async def ReadEmbedding(self, request: Any, context: Any) -> AsyncIterator[pb.ReadEmbeddingResponse]:
        self.seen.append(dict(context.invocation_metadata()))
        for chunk in self.chunks(request):
            yield chunk


async def test_a_call_says_whose_it_is_and_which_image_it_is_about(tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_text("a-token\n")
    token = WatchedFiles("encoder_token_file", (tmp_path / "token",), parse_token)
    data, noting = png(1), Noting()
    key = content_key(image_digest(data), FINGERPRINT, NO_OPTIONS, DEFAULT_TENANT)
    async with (
        scripted_encoder(noting) as target,
        EncoderClient(target, ExpectedRows("llava", 64), replace(CHANNEL, token=token)) as encoder,
    ):
        with acting_for(Identity("shop", "acme", CallerRole.CLIENT)):
            await encoder.encode(key, data, NO_OPTIONS, 10)
            assert await encoder.lookup([key], NO_OPTIONS) == [None]
            await encoder.read_rows(key, 0, 1, memoryview(bytearray(256)), 10, options=NO_OPTIONS)
            assert await encoder.lookup([key, KEY], NO_OPTIONS) == [None, None]
    assert len(noting.seen) == 4
    digests = [metadata.get("x-lookonce-digest") for metadata in noting.seen]
    assert digests == [image_digest(data).hex()] * 3 + [None], "a call about several images goes to any encoder"
    for metadata in noting.seen:
        assert metadata["x-lookonce-tenant"] == "acme"
        assert metadata["authorization"] == "Bearer a-token"
