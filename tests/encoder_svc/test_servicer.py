"""All RPCs on a real server with a real cache: results, statuses, reasons, and nothing internal in any text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from encoder_svc.cache.local_cache import LocalEmbedding
from encoder_svc.vision.vision_model import VisionModel, row_bytes
from lookonce import status_codes
from lookonce.common.v1 import common_pb2
from lookonce.content_key import DEFAULT_TENANT, ContentKey, ProcessorOptions, image_digest
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.errors import OverloadedError
from lookonce.local.redis_server import EmbeddedRedis
from tests import image_files
from tests.encoder_svc.conftest import RunningEncoder, SickModel, StartEncoder
from tests.encoder_svc.encode_requests import TIMEOUT_S, encode_one, failure, key_of, png, request, settled, source
from tests.lookonce.server import raw_calls
from tests.lookonce.store.entries import write

LIMITS = {"max_image_bytes": 200_000, "max_image_pixels": 1_000_000, "max_image_aspect": 50.0, "max_batch_items": 8}


async def read_rows(encoder: RunningEncoder, **fields: Any) -> bytes:
    """All row bytes of a ReadEmbedding call."""
    return b"".join([chunk.data async for chunk in encoder.stub.ReadEmbedding(pb.ReadEmbeddingRequest(**fields))])


async def test_encode_computes_stores_and_finds_again(
    start_encoder: StartEncoder, vision_model: Callable[[str], VisionModel], own_redis: EmbeddedRedis
) -> None:
    async with start_encoder("qwen2_vl", redis_url=own_redis.url) as encoder:
        first = await encode_one(encoder, png(1))
        assert (first.source, first.stored) == (pb.RESULT_SOURCE_COMPUTED, True)
        assert first.compute_time.ToNanoseconds() > 0
        assert first.embedding.key.digest == image_digest(png(1))
        assert first.embedding.key.encoder_fingerprint == vision_model("qwen2_vl").fingerprint
        embedding = first.embedding
        assert (embedding.num_rows, embedding.hidden_size, embedding.size_bytes) == (6, 64, 6 * 64 * 4)
        assert (embedding.dtype, embedding.num_levels) == (common_pb2.DATA_TYPE_FLOAT32, 0)
        assert (embedding.image_width, embedding.image_height) == (80, 60)
        second = await encode_one(encoder, png(1))
        assert (second.source, second.stored) == (pb.RESULT_SOURCE_LOCAL_CACHE, True)
        assert second.compute_time.ToNanoseconds() == 0
        assert encoder.metric("lookonce_encoder_encodes_total") == 1
        assert encoder.metric("lookonce_encoder_cache_hits_total", tier="local") == 1
    async with start_encoder("qwen2_vl", redis_url=own_redis.url) as replica:
        reference = common_pb2.ImageSource(key=embedding.key)
        found = (await replica.stub.Encode(request(reference))).results[0]
        assert (found.source, found.embedding) == (pb.RESULT_SOURCE_SHARED_CACHE, embedding)
        assert replica.metric("lookonce_encoder_cache_hits_total", tier="shared") == 1
        assert replica.metric("lookonce_encoder_encodes_total") == 0


async def test_results_keep_the_order_of_the_items(start_encoder: StartEncoder, shared_redis: EmbeddedRedis) -> None:
    async with start_encoder("llava_siglip", redis_url=shared_redis.url) as encoder:
        files = [png(seed, 60 + 10 * seed, 50) for seed in (3, 1, 2, 1)]
        results = (await encoder.stub.Encode(request(*map(source, files)))).results
        assert [result.embedding.image_width for result in results] == [90, 70, 80, 70]
        assert encoder.metric("lookonce_encoder_encodes_total") == 3


async def test_fifty_calls_for_one_image_cost_one_encode(start_encoder: StartEncoder, own_redis: EmbeddedRedis) -> None:
    async with start_encoder("llava_clip", redis_url=own_redis.url) as encoder:
        results = await asyncio.gather(*(encode_one(encoder, png(1)) for _ in range(50)))
        assert encoder.metric("lookonce_encoder_encodes_total") == 1
        sources = [result.source for result in results]
        assert sources.count(pb.RESULT_SOURCE_COMPUTED) == 1
        assert encoder.metric("lookonce_encoder_coalesced_total", scope="process") == sources.count(
            pb.RESULT_SOURCE_COALESCED
        )


async def test_two_encoders_share_rows(start_encoder: StartEncoder, own_redis: EmbeddedRedis) -> None:
    async with (
        start_encoder("llava_clip", redis_url=own_redis.url) as first,
        start_encoder("llava_clip", redis_url=own_redis.url, local_cache_bytes=0) as second,
    ):
        await encode_one(first, png(1))
        assert (await encode_one(second, png(1))).source == pb.RESULT_SOURCE_SHARED_CACHE
        assert await read_rows(first, key=key_of(png(1))) == await read_rows(second, key=key_of(png(1)))


# These rows fill gRPC's buffers many times over, so a stream that nobody reads stays open.
LARGE = b"an image of many rows"
LARGE_META = EmbeddingMeta(8000, 64, 0, RowDtype.FLOAT32, 10, 10)
LARGE_BYTES = LARGE_META.size_bytes


def large_entry(encoder: RunningEncoder) -> tuple[ContentKey, memoryview]:
    """The key and the rows of an image that no tiny model has."""
    key = encoder.pipeline.key_of(image_digest(LARGE), ProcessorOptions(), DEFAULT_TENANT)
    return key, memoryview(bytes(LARGE_BYTES))


async def test_streams_that_take_no_rows_hold_no_more_than_their_tenant_s_share(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_svc.servicer.CHUNK_BYTES", 16 << 10)
    settings = {"redis_url": own_redis.url, "local_cache_bytes": 0, "max_queued_bytes": 8 * LARGE_BYTES}
    async with start_encoder("llava_clip", **settings) as encoder:
        key, rows = large_entry(encoder)
        assert encoder.pipeline.tiers.store is not None
        assert await asyncio.to_thread(write, encoder.pipeline.tiers.store, key, LARGE_META, rows)
        request = pb.ReadEmbeddingRequest(key=key_of(LARGE))
        streams = [encoder.stub.ReadEmbedding(request) for _ in range(4)]
        for stream in streams:
            await anext(aiter(stream))
        code, reason, error = await failure(encoder.stub.ReadEmbedding(request))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s > 0
        assert encoder.metric("lookonce_encoder_rejected_total", reason="OVERLOADED") == 1
        other = encoder.stub.ReadEmbedding(request, metadata=(("x-lookonce-tenant", "other"),))
        assert (await failure(other))[1] == "EMBEDDING_NOT_CACHED"
        for stream in streams:
            stream.cancel()
        assert len(await read_when_free(encoder, LARGE)) == LARGE_BYTES


async def read_when_free(encoder: RunningEncoder, data: bytes) -> bytes:
    """Reads all rows, and tries again while streams that were cancelled have not ended yet."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                return await read_rows(encoder, key=key_of(data))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.01)


async def test_streams_of_rows_in_the_local_cache_hold_them_once(
    start_encoder: StartEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_svc.servicer.CHUNK_BYTES", 16 << 10)
    async with start_encoder("llava_clip", max_queued_bytes=2 * LARGE_BYTES) as encoder:
        key, rows = large_entry(encoder)
        encoder.pipeline.tiers.local.put(key.value, LocalEmbedding(LARGE_META, rows))
        calls = [encoder.stub.ReadEmbedding(pb.ReadEmbeddingRequest(key=key_of(LARGE))) for _ in range(8)]
        streams = [aiter(call) for call in calls]
        firsts = [len((await anext(stream)).data) for stream in streams]
        for first, stream in zip(firsts, streams, strict=True):
            assert first + sum([len(chunk.data) async for chunk in stream]) == LARGE_BYTES


async def test_read_embedding_streams_whole_rows_of_the_asked_range(
    start_encoder: StartEncoder, vision_model: Callable[[str], VisionModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_svc.servicer.CHUNK_BYTES", 3 * 64 * 4 + 100)
    model = vision_model("llava_clip")
    image = image_files.noise(5)
    expected = bytes(row_bytes(model.forward([model.adapter.pixel_inputs(image, ProcessorOptions())])[0]))
    async with start_encoder("llava_clip") as encoder:
        data = image_files.encoded(image)
        result = await encode_one(encoder, data)
        assert not result.stored
        call = encoder.stub.ReadEmbedding(pb.ReadEmbeddingRequest(key=result.embedding.key, row_offset=2, row_count=7))
        chunks = [chunk async for chunk in call]
        assert [chunk.row_offset for chunk in chunks] == [2, 5, 8]
        assert [chunk.HasField("embedding") for chunk in chunks] == [True, False, False]
        assert chunks[0].embedding == result.embedding
        assert b"".join(chunk.data for chunk in chunks) == expected[2 * 256 : 9 * 256]
        assert await read_rows(encoder, key=key_of(data)) == expected
        assert np.isfinite(np.frombuffer(expected, "<f4")).all()


async def test_rows_of_a_smaller_rendering_are_read_by_their_max_pixels(start_encoder: StartEncoder) -> None:
    async with start_encoder("qwen2_vl") as encoder:
        data = png(1, 300, 200)
        small = await encode_one(encoder, data, max_pixels=4 * 28 * 28)
        large = await encode_one(encoder, data)
        assert small.embedding.num_rows < large.embedding.num_rows
        assert len(await read_rows(encoder, key=key_of(data))) == large.embedding.size_bytes
        assert len(await read_rows(encoder, key=key_of(data), max_pixels=3136)) == small.embedding.size_bytes
        lookup = pb.LookupEmbeddingsRequest(keys=[key_of(data)], max_pixels=3136)
        assert (await encoder.stub.LookupEmbeddings(lookup)).results[0].embedding == small.embedding


async def test_lookup_tells_what_is_cached_and_never_encodes(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis
) -> None:
    async with start_encoder("llava_clip", redis_url=own_redis.url) as encoder:
        result = await encode_one(encoder, png(1))
        keys = [key_of(png(2)), key_of(png(1)), result.embedding.key]
        found = (await encoder.stub.LookupEmbeddings(pb.LookupEmbeddingsRequest(keys=keys, touch=True))).results
        assert [entry.cached for entry in found] == [False, True, True]
        assert [entry.HasField("embedding") for entry in found] == [False, True, True]
        assert found[1].embedding == result.embedding
        assert encoder.metric("lookonce_encoder_encodes_total") == 1
        too_many = pb.LookupEmbeddingsRequest(keys=[key_of(png(1))] * 257)
        assert (await failure(encoder.stub.LookupEmbeddings(too_many)))[:2] == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_PARAMETER",
        )


async def test_encoder_info_publishes_model_and_limits(
    start_encoder: StartEncoder, vision_model: Callable[[str], VisionModel]
) -> None:
    async with start_encoder("qwen2_vl", served_model_name="tiny", **LIMITS) as encoder:
        info = await encoder.stub.GetEncoderInfo(pb.GetEncoderInfoRequest())
        assert (info.model, info.model_type, info.hidden_size) == ("tiny", "qwen2_vl", 64)
        assert info.encoder_fingerprint == vision_model("qwen2_vl").fingerprint
        assert (info.max_batch_items, info.max_image_bytes, info.max_image_pixels) == (8, 200_000, 1_000_000)
        assert (info.dtype, info.num_levels) == (common_pb2.DATA_TYPE_FLOAT32, 0)
        assert info.max_message_bytes == 32 << 20
        assert info.version


async def test_in_deterministic_mode_every_image_has_a_forward_pass_of_its_own(
    start_encoder: StartEncoder, shared_redis: EmbeddedRedis
) -> None:
    items = [pb.EncodeItem(image=source(png(700 + index))) for index in range(6)]
    async with start_encoder("llava_clip", redis_url=shared_redis.url, deterministic=True) as encoder:
        await encoder.stub.Encode(pb.EncodeRequest(items=items))
        assert encoder.metric("lookonce_encoder_forward_images_count") == 6
        assert encoder.metric("lookonce_encoder_forward_images_sum") == 6


BAD_IMAGES: dict[str, tuple[bytes, str]] = {
    "text": (b"not an image", "IMAGE_UNDECODABLE"),
    "empty": (b"", "IMAGE_UNDECODABLE"),
    "other format": (image_files.encoded(image_files.noise(), "BMP"), "IMAGE_UNDECODABLE"),
    "truncated header": (png(1)[:20], "IMAGE_UNDECODABLE"),
    "truncated pixels": (png(1)[:-300], "IMAGE_UNDECODABLE"),
    "truncated avif": (image_files.encoded(image_files.noise(), "AVIF")[:-300], "IMAGE_UNDECODABLE"),
    "broken exif": (image_files.jpeg_with_broken_exif(), "IMAGE_UNDECODABLE"),
    "too many bytes": (bytes(200_001), "IMAGE_TOO_LARGE"),
    "too many pixels": (image_files.png_of_size(13_300, 13_400), "IMAGE_TOO_LARGE"),
    "extreme aspect": (image_files.png_of_size(5000, 1), "IMAGE_TOO_LARGE"),
    "no pixels": (image_files.png_of_size(0, 10), "IMAGE_TOO_LARGE"),
    "too many scans": (image_files.jpeg_of_many_scans(1000, 1000, 1000), "IMAGE_DECODE_LIMIT"),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
async def test_a_bad_image_is_refused_alone(kind: str, start_encoder: StartEncoder) -> None:
    data, reason = BAD_IMAGES[kind]
    async with start_encoder("llava_clip", **{**LIMITS, "max_image_bytes": 200_000}) as encoder:
        mates = [asyncio.create_task(encode_one(encoder, png(seed))) for seed in range(8)]
        code, found_reason, error = await failure(encoder.stub.Encode(request(source(png(9)), source(data))))
        assert (code, found_reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert error.metadata["index"] == "1"
        assert {result.embedding.num_rows for result in await asyncio.gather(*mates)} == {16}
        assert (await encode_one(encoder, png(10))).source == pb.RESULT_SOURCE_COMPUTED
        assert encoder.metric("lookonce_encoder_queued_images") == 0
        assert (await failure(encoder.stub.ReadEmbedding(pb.ReadEmbeddingRequest(key=key_of(data)))))[1] == (
            "EMBEDDING_NOT_CACHED"
        )


BAD_REQUESTS: dict[str, tuple[pb.EncodeRequest, str, str]] = {
    "no items": (request(), "INVALID_PARAMETER", "items"),
    "too many items": (request(*[source(png(1))] * 9), "INVALID_PARAMETER", "items"),
    "no source": (request(common_pb2.ImageSource()), "INVALID_PARAMETER", "items[0].image"),
    "unknown policy": (request(source(png(1)), cache_policy=77), "INVALID_PARAMETER", "cache_policy"),
    "short digest": (
        request(common_pb2.ImageSource(key=common_pb2.ContentKey(digest=b"short"))),
        "INVALID_PARAMETER",
        "items[0].image.key.digest",
    ),
    "short expected digest": (
        request(source(png(1), expected_digest=b"short")),
        "INVALID_PARAMETER",
        "items[0].image.expected_digest",
    ),
    "other hash": (
        request(common_pb2.ImageSource(key=key_of(png(1), algorithm=common_pb2.HASH_ALGORITHM_BLAKE3))),
        "INVALID_PARAMETER",
        "items[0].image.key.algorithm",
    ),
    "max_pixels of a fixed size model": (
        request(source(png(1)), source(png(2), max_pixels=5000)),
        "INVALID_PARAMETER",
        "items[1].image.max_pixels",
    ),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
async def test_a_bad_request_names_its_field(kind: str, start_encoder: StartEncoder) -> None:
    bad, reason, field = BAD_REQUESTS[kind]
    async with start_encoder("llava_clip", **LIMITS) as encoder:
        code, found_reason, error = await failure(encoder.stub.Encode(bad))
        assert (code, found_reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert error.metadata["field"] == field
        assert (await encode_one(encoder, png(1))).embedding.num_rows == 16


async def test_a_digest_that_the_bytes_do_not_have_stores_nothing(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis
) -> None:
    async with start_encoder("llava_clip", redis_url=own_redis.url) as encoder:
        forged = source(png(1), expected_digest=image_digest(png(2)))
        assert (await failure(encoder.stub.Encode(request(forged))))[:2] == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "DIGEST_MISMATCH",
        )
        assert encoder.metric("lookonce_encoder_rejected_total", reason="DIGEST_MISMATCH") == 1
        lookup = pb.LookupEmbeddingsRequest(keys=[key_of(png(1)), key_of(png(2))])
        assert not any(entry.cached for entry in (await encoder.stub.LookupEmbeddings(lookup)).results)


async def test_missing_digests_are_one_not_found_with_all_indexes(start_encoder: StartEncoder) -> None:
    async with start_encoder("llava_clip") as encoder:
        await encode_one(encoder, png(1))
        references = [common_pb2.ImageSource(key=key_of(png(seed))) for seed in (5, 1, 6)]
        code, reason, error = await failure(encoder.stub.Encode(request(*references)))
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "EMBEDDING_NOT_CACHED")
        assert error.metadata["indexes"] == "0,2"
        only_cached = request(source(png(7)), cache_policy=pb.CACHE_POLICY_ONLY_IF_CACHED)
        assert (await failure(encoder.stub.Encode(only_cached)))[0] is grpc.StatusCode.NOT_FOUND
        assert encoder.metric("lookonce_encoder_rejected_total", reason="EMBEDDING_NOT_CACHED") == 3
        missing = encoder.stub.ReadEmbedding(pb.ReadEmbeddingRequest(key=key_of(png(5))))
        assert (await failure(missing))[:2] == (grpc.StatusCode.NOT_FOUND, "EMBEDDING_NOT_CACHED")


async def test_another_encoders_fingerprint_is_refused_everywhere(start_encoder: StartEncoder) -> None:
    foreign = key_of(png(1), encoder_fingerprint="0" * 64)
    async with start_encoder("llava_clip") as encoder:
        await encode_one(encoder, png(1))
        calls = [
            encoder.stub.Encode(request(source(png(1)), expected_encoder_fingerprint="0" * 64)),
            encoder.stub.Encode(request(common_pb2.ImageSource(key=foreign))),
            encoder.stub.LookupEmbeddings(pb.LookupEmbeddingsRequest(keys=[foreign])),
            encoder.stub.ReadEmbedding(pb.ReadEmbeddingRequest(key=foreign)),
        ]
        for call in calls:
            assert (await failure(call))[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")


async def test_refresh_encodes_again(start_encoder: StartEncoder, own_redis: EmbeddedRedis) -> None:
    async with start_encoder("llava_clip", redis_url=own_redis.url) as encoder:
        await encode_one(encoder, png(1))
        again = request(source(png(1)), cache_policy=pb.CACHE_POLICY_REFRESH)
        result = (await encoder.stub.Encode(again)).results[0]
        assert (result.source, result.stored) == (pb.RESULT_SOURCE_COMPUTED, True)
        assert encoder.metric("lookonce_encoder_encodes_total") == 2


async def test_overload_is_refused_with_a_delay_and_passes(
    start_encoder: StartEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_encoder("llava_clip", max_queued_images=2, max_batch_items=2) as encoder:
        adapter = encoder.pipeline.model.adapter
        gate, image_rows = threading.Event(), adapter.image_rows
        monkeypatch.setattr(adapter, "image_rows", lambda *batch: gate.wait(30) and image_rows(*batch))
        calls = [asyncio.ensure_future(encode_one(encoder, png(seed))) for seed in range(20)]
        while sum(call.done() for call in calls) < 18:
            await asyncio.sleep(0.01)
        gate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert len(refused) == 18
        for refusal in refused:
            error = status_codes.from_rpc_error(refusal)
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert status_codes.status_row(error).reason == "OVERLOADED"
            assert getattr(error, "retry_after_s", 0) > 0
        assert (await encode_one(encoder, png(50))).source == pb.RESULT_SOURCE_COMPUTED


async def test_a_call_of_images_that_do_not_fit_is_refused_and_gives_its_places_to_the_next_one(
    start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    async with start_encoder("llava_clip", max_queued_images=6, max_batch_items=6) as encoder:
        sick_model.gate.clear()
        batcher = encoder.pipeline._encoder._batcher

        def sent(*seeds: int) -> asyncio.Future[Any]:
            call = encoder.stub.Encode(request(*(source(png(seed)) for seed in seeds)))
            waiting: asyncio.Future[Any] = asyncio.ensure_future(call)
            return waiting

        running = sent(0)
        await settled(lambda: batcher.running_s > 0)
        # Five of its images fit. They wait for the model, which works on another one.
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await asyncio.wait_for(sent(*range(1, 7)), TIMEOUT_S)
        assert isinstance(status_codes.from_rpc_error(refusal.value), OverloadedError)
        # Images that are being decoded keep their places until that ends.
        async with asyncio.timeout(TIMEOUT_S):
            while (await asyncio.wait([next_one := sent(*range(7, 12))], timeout=0.3))[0]:
                refused = next_one.exception()
                assert isinstance(refused, grpc.aio.AioRpcError)
                assert isinstance(status_codes.from_rpc_error(refused), OverloadedError)
        sick_model.gate.set()
        for call in (running, next_one):
            assert isinstance(await asyncio.wait_for(call, TIMEOUT_S), pb.EncodeResponse)


async def test_killing_redis_costs_neither_answers_nor_rows(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis
) -> None:
    async with start_encoder("llava_clip", redis_url=own_redis.url) as encoder:
        before = await encode_one(encoder, png(1))
        assert before.stored
        rows = await read_rows(encoder, key=before.embedding.key)
        os.kill(own_redis.pid, signal.SIGKILL)
        after = await encode_one(encoder, png(2))
        assert (after.source, after.stored) == (pb.RESULT_SOURCE_COMPUTED, False)
        assert len(await read_rows(encoder, key=after.embedding.key)) == after.embedding.size_bytes
        assert await read_rows(encoder, key=before.embedding.key) == rows
        again = await encode_one(encoder, png(1))
        assert (again.source, again.stored) == (pb.RESULT_SOURCE_LOCAL_CACHE, False)


async def test_a_tenant_that_fills_the_queue_does_not_shut_others_out(
    start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    async with start_encoder("llava_clip", max_queued_images=6, max_batch_items=6) as encoder:
        sick_model.gate.clear()

        def sent(tenant: str, seed: int) -> Any:
            metadata = (("x-lookonce-tenant", tenant), ("x-request-id", "the same"))
            return encoder.stub.Encode(request(source(png(seed))), metadata=metadata)

        many = [sent("many", 0)]
        batcher = encoder.pipeline._encoder._batcher
        await settled(lambda: batcher.running_s > 0)
        for seed in range(1, 6):
            many.append(sent("many", seed))
            # An image that is still being decoded could not be pushed out.
            await settled(lambda: len(batcher._queue) == len(many) - 1)
        others = [sent(tenant, 9) for tenant in ("one", "two")]
        for call in (many.pop(), many.pop()):
            code, reason, error = await failure(call)
            assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert isinstance(error, OverloadedError)
            assert error.retry_after_s > 0
        sick_model.gate.set()
        answers = await asyncio.gather(*many, *others)
        assert {answer.results[0].source for answer in answers} == {pb.RESULT_SOURCE_COMPUTED}
        assert encoder.metric("lookonce_encoder_rejected_total", reason="OVERLOADED") == 2


async def test_files_of_calls_that_join_an_encode_count_for_their_tenant_alone(
    start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    data = png(1)
    async with start_encoder("llava_clip", max_queued_bytes=4 * len(data) + 100) as encoder:
        sick_model.gate.clear()

        def sent(tenant: str, *images: common_pb2.ImageSource) -> Any:
            return encoder.stub.Encode(request(*images), metadata=(("x-lookonce-tenant", tenant),))

        accepted = [sent("many", source(data))]
        await settled(lambda: encoder.pipeline._encoder._batcher.running_s > 0)
        accepted.append(sent("many", source(data)))
        await settled(lambda: encoder.metric("lookonce_encoder_queued_bytes") == 2 * len(data))
        code, reason, error = await failure(sent("many", source(data)))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert isinstance(error, OverloadedError)
        accepted.append(sent("one", source(data)))
        await settled(lambda: encoder.metric("lookonce_encoder_queued_bytes") == 3 * len(data))
        sick_model.gate.set()
        for answer in await asyncio.gather(*accepted):
            assert len(answer.results) == 1
        assert encoder.metric("lookonce_encoder_queued_bytes") == 0
        assert encoder.metric("lookonce_encoder_rejected_total", reason="OVERLOADED") == 1


@pytest.mark.parametrize("method", ["Encode", "EncodeStream"])
async def test_rows_in_answers_that_nobody_takes_are_bounded_and_given_back(
    start_encoder: StartEncoder, vision_model: Callable[[str], VisionModel], method: str
) -> None:
    async with start_encoder("llava_clip") as encoder:
        (result,) = (await encoder.stub.Encode(request(source(png(1))))).results
    # Enough for two unread answers of a tenant, but not for a third.
    async with start_encoder("llava_clip", max_queued_bytes=3 * result.embedding.size_bytes) as encoder:
        item = pb.EncodeItem(image=source(png(1)), rows_if_not_stored=True)
        message = pb.EncodeRequest(items=[item]) if method == "Encode" else pb.EncodeStreamRequest(item=item)

        async def num_row_bytes() -> int:
            (one,) = (await encoder.stub.Encode(pb.EncodeRequest(items=[item]), timeout=TIMEOUT_S)).results
            return len(one.rows)

        with contextlib.ExitStack() as unread:
            for _ in range(2):
                connection = unread.enter_context(
                    await asyncio.to_thread(raw_calls.connect, encoder.target, window_bytes=0)
                )
                path = f"/lookonce.encoder.v1.EncoderService/{method}"
                connection.sendall(raw_calls.call(1, path, message.SerializeToString()))
                await asyncio.to_thread(raw_calls.wait_until_answered, connection)
            assert await num_row_bytes() == 0
            # The answer is complete without its rows, and the refusal is counted.
            assert encoder.metric("lookonce_encoder_rejected_total", reason="OVERLOADED") == 1
        async with asyncio.timeout(TIMEOUT_S):
            while await num_row_bytes() == 0:
                await asyncio.sleep(0.01)
