"""EncodeStream answers as results are ready, keeps errors with their items, and bears clients that stop or leave."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator

import grpc
import pytest
import torch
from google.rpc import code_pb2

from lookonce.common.v1 import common_pb2
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.local.redis_server import EmbeddedRedis
from tests.encoder_svc.conftest import SickModel, StartEncoder
from tests.encoder_svc.encode_requests import (
    INTERNALS,
    black,
    encode_one,
    failure,
    key_of,
    png,
    request,
    settled,
    source,
    stream_request,
)


async def test_a_stream_answers_every_item_and_errors_stay_with_their_item(
    start_encoder: StartEncoder, shared_redis: EmbeddedRedis
) -> None:
    async def requests() -> AsyncIterator[pb.EncodeStreamRequest]:
        for index in range(40):
            image = source(b"no image" if index == 7 else png(100 + index % 10))
            if index == 9:
                image = common_pb2.ImageSource(key=key_of(b"never sent"))
            if index == 11:
                image = common_pb2.ImageSource()
            yield pb.EncodeStreamRequest(item_id=str(index), item=pb.EncodeItem(image=image))

    async with start_encoder("llava_clip", redis_url=shared_redis.url) as encoder:
        answers = {answer.item_id: answer async for answer in encoder.stub.EncodeStream(requests())}
        assert sorted(map(int, answers)) == list(range(40))
        assert encoder.metric("lookonce_encoder_encodes_total") == 10
        failed = {item_id: answer.error for item_id, answer in answers.items() if answer.HasField("error")}
        assert {item_id: (error.code, error.reason) for item_id, error in failed.items()} == {
            "7": (code_pb2.INVALID_ARGUMENT, "IMAGE_UNDECODABLE"),
            "9": (code_pb2.NOT_FOUND, "EMBEDDING_NOT_CACHED"),
            "11": (code_pb2.INVALID_ARGUMENT, "INVALID_PARAMETER"),
        }
        assert not any(INTERNALS.search(error.message) for error in failed.values())


async def test_a_stream_item_whose_forward_pass_fails_is_an_opaque_internal_error(
    start_encoder: StartEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def requests() -> AsyncIterator[pb.EncodeStreamRequest]:
        yield pb.EncodeStreamRequest(item_id="a", item=pb.EncodeItem(image=source(png(1))))

    async with start_encoder("llava_clip") as encoder:
        adapter = encoder.pipeline.model.adapter
        with monkeypatch.context() as broken:
            broken.setattr(adapter, "image_rows", lambda *_: [])
            answers = [answer async for answer in encoder.stub.EncodeStream(requests())]
            assert answers[0].error.reason == "INTERNAL"
            assert re.fullmatch(r"internal error [0-9a-f]{32}", answers[0].error.message)
            assert (await failure(encoder.stub.Encode(request(source(png(1))))))[0] is grpc.StatusCode.INTERNAL
        assert (await encode_one(encoder, png(1))).source == pb.RESULT_SOURCE_COMPUTED


async def test_without_memory_for_a_forward_pass_clients_are_asked_to_come_back(
    start_encoder: StartEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def image_rows(*_: object) -> list[torch.Tensor]:
        return [torch.empty(1 << 50)]

    async def requests() -> AsyncIterator[pb.EncodeStreamRequest]:
        yield stream_request(0, png(1))

    async with start_encoder("llava_clip") as encoder:
        with monkeypatch.context() as poor:
            poor.setattr(encoder.pipeline.model.adapter, "image_rows", image_rows)
            (answer,) = [answer async for answer in encoder.stub.EncodeStream(requests())]
            assert (answer.error.code, answer.error.reason) == (code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert not INTERNALS.search(answer.error.message)
            code, reason, _ = await failure(encoder.stub.Encode(request(source(png(1)))))
            assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        method = "/lookonce.encoder.v1.EncoderService/Encode"
        assert encoder.metric("lookonce_grpc_memory_errors_total", method=method) == 1
        assert encoder.metric("lookonce_encoder_rejected_total", reason="OVERLOADED") == 2
        assert (await encode_one(encoder, png(1))).source == pb.RESULT_SOURCE_COMPUTED


async def test_one_poisonous_image_among_fifty_costs_the_others_nothing_but_time(
    start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    async def requests() -> AsyncIterator[pb.EncodeStreamRequest]:
        for index in range(50):
            yield stream_request(index, black(64) if index == 17 else png(index))

    async with start_encoder("llava_clip") as encoder:
        answers = {answer.item_id: answer async for answer in encoder.stub.EncodeStream(requests())}
        assert sorted(map(int, answers)) == list(range(50))
        failed = {item_id: answer.error for item_id, answer in answers.items() if answer.HasField("error")}
        assert list(failed) == ["17"]
        assert (failed["17"].code, failed["17"].reason) == (code_pb2.INVALID_ARGUMENT, "IMAGE_POISONOUS")
        assert not INTERNALS.search(failed["17"].message)
        assert {answer.result.embedding.num_rows for answer in answers.values() if answer.HasField("result")} == {16}
        assert encoder.metric("lookonce_encoder_encodes_total") == 49
        assert encoder.metric("lookonce_encoder_queued_images") == 0


async def test_ready_images_do_not_wait_for_others(start_encoder: StartEncoder, sick_model: SickModel) -> None:
    async def requests() -> AsyncIterator[pb.EncodeStreamRequest]:
        yield stream_request(0, png(1))
        yield stream_request(1, png(2))

    async with start_encoder("llava_clip") as encoder:
        await encode_one(encoder, png(2))
        sick_model.gate.clear()
        answers = aiter(encoder.stub.EncodeStream(requests()))
        assert (await anext(answers)).item_id == "1"
        sick_model.gate.set()
        assert [answer.item_id async for answer in answers] == ["0"]


async def test_a_client_that_stops_reading_stops_the_work_and_loses_nothing(start_encoder: StartEncoder) -> None:
    num_items = 300

    async def requests() -> AsyncIterator[pb.EncodeStreamRequest]:
        for index in range(num_items):
            yield stream_request(index, png(index), rows_if_not_stored=True)

    # Rows of 4 KiB each against a window of 64 KiB.
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with start_encoder("llava_clip", channel_options=narrow) as encoder:
        call = encoder.stub.EncodeStream(requests())
        first = await call.read()
        assert isinstance(first, pb.EncodeStreamResponse)
        num_encoded = -1.0
        # On a busy machine an image may take longer than the pause between two looks.
        while num_encoded != (num_encoded := encoder.metric("lookonce_encoder_encodes_total")) or encoder.metric(
            "lookonce_encoder_queued_images"
        ):
            await asyncio.sleep(0.5)
        assert num_encoded < num_items / 2
        assert (await encode_one(encoder, png(1000))).source == pb.RESULT_SOURCE_COMPUTED
        answers = [first]
        while isinstance(answer := await call.read(), pb.EncodeStreamResponse):
            answers.append(answer)
        assert sorted(int(answer.item_id) for answer in answers) == list(range(num_items))
        assert {len(answer.result.rows) for answer in answers} == {16 * 64 * 4}


async def test_a_client_that_leaves_ends_its_stream(start_encoder: StartEncoder) -> None:
    async def requests() -> AsyncIterator[pb.EncodeStreamRequest]:
        for index in itertools.count():
            yield stream_request(index, png(index))

    async with start_encoder("llava_clip") as encoder:
        call = encoder.stub.EncodeStream(requests())
        for _ in range(3):
            await call.read()
        assert call.cancel()
        cancelled = {"method": "/lookonce.encoder.v1.EncoderService/EncodeStream", "code": "CANCELLED"}
        await settled(lambda: encoder.metric("lookonce_grpc_requests_total", **cancelled) == 1)
        await settled(lambda: encoder.metric("lookonce_encoder_queued_images") == 0)
        num_encoded = encoder.metric("lookonce_encoder_encodes_total")
        assert (await encode_one(encoder, png(1_000_000))).source == pb.RESULT_SOURCE_COMPUTED
        assert encoder.metric("lookonce_encoder_encodes_total") == num_encoded + 1
