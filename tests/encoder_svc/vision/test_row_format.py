"""Int8 rows are the same bytes on every path, have their own keys, and their error is logged."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing
import torch
from prometheus_client import CollectorRegistry

from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.row_format import stored_forward
from encoder_svc.vision.vision_model import VisionModel, row_bytes
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ProcessorOptions
from lookonce.embedding_meta import RowDtype
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.int8_rows import quantise
from tests import image_files, tiny_models
from tests.encoder_svc.conftest import RunningEncoder, StartEncoder, encoder_settings

Folders = Callable[[str], pathlib.Path]
Models = Callable[[str], VisionModel]

IMAGE = image_files.noise(3)
FILE = image_files.encoded(IMAGE)
NUM_ROWS = 16
ROW_BYTES = 4 + tiny_models.HIDDEN_SIZE


@pytest.fixture(scope="module")
def int8_model(tiny_folder: Folders) -> VisionModel:
    return VisionModel.load(encoder_settings(tiny_folder("llava_clip"), row_format="int8").vision)


def native_rows(model: VisionModel) -> torch.Tensor:
    """The model's own rows for IMAGE, before rounding."""
    return model.forward([model.adapter.pixel_inputs(IMAGE, ProcessorOptions())])[0]


async def encode(encoder: RunningEncoder) -> pb.EncodeResult:
    item = pb.EncodeItem(image=common_pb2.ImageSource(data=FILE), rows_if_not_stored=True)
    return (await encoder.stub.Encode(pb.EncodeRequest(items=[item]))).results[0]


async def read(encoder: RunningEncoder, result: pb.EncodeResult, **fields: Any) -> bytes:
    call = encoder.stub.ReadEmbedding(pb.ReadEmbeddingRequest(key=result.embedding.key, **fields))
    return b"".join([chunk.data async for chunk in call])


@contextlib.contextmanager
def captured_drift() -> Iterator[list[float]]:
    """Collects the relative errors that are logged in the block."""
    errors: list[float] = []
    with structlog.testing.capture_logs() as entries:
        yield errors
    errors += [entry["relative_error"] for entry in entries if "relative_error" in entry]


async def test_every_path_carries_the_bytes_of_one_quantisation(
    start_encoder: StartEncoder, vision_model: Models, own_redis: EmbeddedRedis
) -> None:
    expected = quantise(native_rows(vision_model("llava_clip")), 0)
    data = expected.data.numpy().tobytes()
    settings = {"row_format": "int8"}
    async with start_encoder("llava_clip", **settings) as alone:
        result = await encode(alone)
        assert not result.stored
        assert (result.embedding.dtype, result.embedding.size_bytes) == (common_pb2.DATA_TYPE_INT8_SCALED, len(data))
        assert result.rows == data == await read(alone, result)
        assert await read(alone, result, row_offset=5, row_count=3) == data[5 * ROW_BYTES : 8 * ROW_BYTES]
        assert alone.metric("lookonce_encoder_int8_relative_error_count") == 1
        drift = alone.metric("lookonce_encoder_int8_relative_error_sum")
        assert drift == pytest.approx(expected.relative_error)
        assert 0.001 < drift < 0.02
    async with start_encoder("llava_clip", redis_url=own_redis.url, **settings) as writer:
        stored = await encode(writer)
        assert (stored.stored, stored.rows) == (True, b"")
    async with start_encoder("llava_clip", redis_url=own_redis.url, local_cache_bytes=0, **settings) as reader:
        found = await encode(reader)
        assert (found.source, found.embedding) == (pb.RESULT_SOURCE_SHARED_CACHE, stored.embedding)
        assert found.embedding == result.embedding
        assert await read(reader, found) == data
        assert await read(reader, found, row_offset=7, row_count=9) == data[7 * ROW_BYTES :]


async def test_int8_and_native_rows_of_one_model_never_meet(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis
) -> None:
    async with (
        start_encoder("llava_clip", redis_url=own_redis.url) as native,
        start_encoder("llava_clip", redis_url=own_redis.url, row_format="int8") as int8,
    ):
        results = [await encode(encoder) for encoder in (native, int8)]
        infos = [await encoder.stub.GetEncoderInfo(pb.GetEncoderInfoRequest()) for encoder in (native, int8)]
    assert [result.source for result in results] == [pb.RESULT_SOURCE_COMPUTED] * 2
    assert [info.dtype for info in infos] == [common_pb2.DATA_TYPE_FLOAT32, common_pb2.DATA_TYPE_INT8_SCALED]
    fingerprints = [info.encoder_fingerprint for info in infos]
    assert [result.embedding.key.encoder_fingerprint for result in results] == fingerprints
    assert fingerprints[0] != fingerprints[1]


def test_the_row_format_is_part_of_the_fingerprint_beside_the_dtype(
    tiny_folder: Folders, vision_model: Models, int8_model: VisionModel
) -> None:
    folder = tiny_folder("llava_clip")
    models = [
        vision_model("llava_clip"),
        int8_model,
        VisionModel.load(encoder_settings(folder, dtype="bfloat16").vision),
        VisionModel.load(encoder_settings(folder, dtype="bfloat16", row_format="int8").vision),
    ]
    assert len({model.fingerprint for model in models}) == 4
    again = VisionModel.load(encoder_settings(folder, row_format="int8").vision)
    assert again.fingerprint == int8_model.fingerprint
    assert [model.dtype for model in models] == [RowDtype.FLOAT32] * 2 + [RowDtype.BFLOAT16] * 2
    assert [model.row_dtype is RowDtype.INT8_SCALED for model in models] == [False, True] * 2


def test_native_rows_go_through_untouched(vision_model: Models, int8_model: VisionModel) -> None:
    model, metrics = vision_model("llava_clip"), EncoderMetrics(CollectorRegistry())
    assert model.row_dtype is model.dtype
    (rows,) = stored_forward(model, metrics)([model.adapter.pixel_inputs(IMAGE, ProcessorOptions())])
    assert bytes(row_bytes(rows)) == bytes(row_bytes(native_rows(model)))
    assert torch.equal(native_rows(int8_model), rows), "the model's own rows are the same in both formats"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_refused_before_they_are_rounded(
    bad: float, int8_model: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    rows = torch.zeros(NUM_ROWS, tiny_models.HIDDEN_SIZE)
    rows[3, 5] = bad
    monkeypatch.setattr(int8_model.adapter, "image_rows", lambda *_: [rows])
    with pytest.raises(ValueError, match="not finite"):
        stored_forward(int8_model, EncoderMetrics(registry))(
            [int8_model.adapter.pixel_inputs(IMAGE, ProcessorOptions())]
        )
    assert registry.get_sample_value("lookonce_encoder_int8_relative_error_count") == 0


def test_the_warm_up_tells_the_drift_once(tiny_folder: Folders, vision_model: Models) -> None:
    model = VisionModel.load(encoder_settings(tiny_folder("qwen2_vl"), row_format="int8").vision)
    with captured_drift() as errors:
        for warmed in (model, model, vision_model("qwen2_vl")):
            warmed.warm_up()
    (error,) = errors
    assert 0.001 < error < 0.02
