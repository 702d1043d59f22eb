"""An image on which the model fails is refused alone, and untried after two attempts; other images succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
import torch

from encoder_svc.cache.encode_job import CachePolicy, ImageInput
from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.vision import batcher
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions, Tenant
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.errors import ImagePoisonousError
from tests.encoder_svc.conftest import RunningEncoder, SickModel, StartEncoder
from tests.encoder_svc.encode_requests import black, encode_one, failure, png, request, settled, source

POISONOUS = (grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_POISONOUS")
FORWARD = {"stage": "forward"}


async def test_a_poisonous_image_ends_its_own_call_and_no_other_one(
    start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    async with start_encoder("llava_clip") as encoder:
        sick_model.gate.clear()
        first = asyncio.ensure_future(encode_one(encoder, png(100)))
        await settled(lambda: encoder.pipeline._encoder._batcher.running_s > 0)
        bad = asyncio.ensure_future(failure(encoder.stub.Encode(request(source(png(1)), source(black(64))))))
        mates = [asyncio.ensure_future(encode_one(encoder, png(seed))) for seed in range(2, 7)]
        await settled(lambda: len(encoder.pipeline._encoder._batcher._queue) == 7)
        sick_model.gate.set()
        code, reason, error = await bad
        assert (code, reason, error.metadata["index"]) == (*POISONOUS, "1")
        assert {result.source for result in await asyncio.gather(first, *mates)} == {pb.RESULT_SOURCE_COMPUTED}
        assert (7, 1) in sick_model.passes, "all seven shared a pass that failed"
        assert encoder.metric("lookonce_encoder_queued_images") == 0


async def test_after_two_failures_of_its_own_the_model_is_not_asked_again(
    start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    async with start_encoder("llava_clip") as encoder:
        for num_passes in (1, 2, 2, 2):
            assert (await failure(encoder.stub.Encode(request(source(black(64))))))[:2] == POISONOUS
            assert sick_model.num_black == num_passes
        assert encoder.metric("lookonce_encoder_poisonous_total", **FORWARD) == 2
        assert encoder.metric("lookonce_encoder_quarantine_refused_total", **FORWARD) == 2
        # Other images and other tenants are not affected.
        assert (await encode_one(encoder, png(1))).source == pb.RESULT_SOURCE_COMPUTED
        stranger = Tenant("stranger", b"another secret")
        image = ImageInput(black(64), None, ProcessorOptions())
        with pytest.raises(ImagePoisonousError, match="the model fails"):
            await encoder.pipeline.encode(image, CachePolicy.READ_AND_WRITE, stranger, "stranger")
        assert sick_model.num_black == 3
        assert encoder.metric("lookonce_encoder_queued_images") == 0


async def test_other_options_are_another_image(
    start_encoder: StartEncoder, vision_model: Callable[[str], VisionModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = vision_model("qwen2_vl").adapter
    healthy, num_failed = adapter.image_rows, 0

    def image_rows(model: object, batch: list[PixelInputs]) -> list[torch.Tensor]:
        nonlocal num_failed
        # 12 × 8 patches are the image as it is; neither its smaller rendering nor the control's pictures have them.
        if any(inputs.pixel_values.shape[0] == 96 for inputs in batch):
            num_failed += 1
            raise RuntimeError("sick")
        return healthy(model, batch)

    monkeypatch.setattr(adapter, "image_rows", image_rows)
    async with start_encoder("qwen2_vl") as encoder:
        for _ in range(4):
            assert (await failure(encoder.stub.Encode(request(source(png(1, 168, 112))))))[:2] == POISONOUS
        assert num_failed == 2
        assert (await encode_one(encoder, png(1, 168, 112), max_pixels=3136)).source == pb.RESULT_SOURCE_COMPUTED


async def test_a_model_that_fails_on_everything_puts_nothing_into_quarantine(
    start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    files = [png(seed) for seed in range(5)]
    async with start_encoder("llava_clip") as encoder:
        sick_model.fails_on_all = True
        for _ in range(3):
            calls = [failure(encoder.stub.Encode(request(source(data)))) for data in files]
            assert {code for code, _, _ in await asyncio.gather(*calls)} == {grpc.StatusCode.INTERNAL}
        assert encoder.metric("lookonce_encoder_model_faults_total") > 0
        assert encoder.metric("lookonce_encoder_poisonous_total", **FORWARD) == 0
        sick_model.fails_on_all = False
        results = await asyncio.gather(*(encode_one(encoder, data) for data in files))
        assert {result.source for result in results} == {pb.RESULT_SOURCE_COMPUTED}


async def test_a_model_that_fails_on_everything_is_unhealthy_until_it_works_again(
    start_encoder: StartEncoder, sick_model: SickModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "_RECOVERY_PAUSE_S", 0.05)
    async with start_encoder("llava_clip") as encoder:
        sick_model.fails_on_all = True
        for seed in range(3):
            assert encoder.pipeline.is_healthy
            assert (await failure(encoder.stub.Encode(request(source(png(seed))))))[0] is grpc.StatusCode.INTERNAL
        assert not encoder.pipeline.is_healthy
        num_passes = len(sick_model.passes)
        await settled(lambda: len(sick_model.passes) > num_passes + 1)
        assert not encoder.pipeline.is_healthy
        assert encoder.metric("lookonce_encoder_model_faults_total") == 3, "trying again is no failed pass"
        sick_model.fails_on_all = False
        await settled(lambda: encoder.pipeline.is_healthy)
        num_passes = len(sick_model.passes)
        await asyncio.sleep(0.2)
        assert len(sick_model.passes) == num_passes, "what works is not tried again"


async def test_a_failure_before_a_success_is_not_held_against_the_image(
    start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    again = request(source(black(64)), cache_policy=pb.CACHE_POLICY_REFRESH)
    async with start_encoder("llava_clip") as encoder:
        for _ in range(3):
            sick_model.fails_on_black = True
            assert (await failure(encoder.stub.Encode(again)))[:2] == POISONOUS
            sick_model.fails_on_black = False
            assert (await encoder.stub.Encode(again)).results[0].source == pb.RESULT_SOURCE_COMPUTED


@pytest.mark.parametrize("is_one_call", [True, False], ids=["one call", "calls of one request id"])
async def test_a_request_of_many_images_lets_another_one_through(
    is_one_call: bool, start_encoder: StartEncoder, sick_model: SickModel
) -> None:
    files = [png(seed) for seed in range(13)]

    def large(encoder: RunningEncoder) -> list[asyncio.Future[pb.EncodeResponse]]:
        batches = [files] if is_one_call else [[data] for data in files]
        stub, metadata = encoder.stub, (("x-request-id", "large"),)
        return [
            asyncio.ensure_future(stub.Encode(request(*map(source, batch)), metadata=metadata)) for batch in batches
        ]

    async with start_encoder("llava_clip", max_forward_images=4) as encoder:
        queue = encoder.pipeline._encoder._batcher._queue
        sick_model.gate.clear()
        first = asyncio.ensure_future(encode_one(encoder, png(100)))
        await settled(lambda: encoder.pipeline._encoder._batcher.running_s > 0)
        calls = large(encoder)
        await settled(lambda: len(queue) == 13)
        small = asyncio.ensure_future(encode_one(encoder, png(200)))
        await settled(lambda: len(queue) == 14)
        callers = [job.caller.request_id for job in queue.plan()]
        assert callers.count("large") == 3
        sick_model.gate.set()
        await asyncio.gather(first, small, *calls)
        assert [num_images for num_images, _ in sick_model.passes] == [1, 4, 4, 4, 2]
