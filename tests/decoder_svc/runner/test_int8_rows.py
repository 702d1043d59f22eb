"""Int8 rows from the encoder to the device: every path gives the same rows, and unknown element types are refused."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.row_cache import RowCache
from decoder_svc.scheduling.prompt import ImageItem, Span
from decoder_svc.scheduling.row_range import RowRange
from lookonce.common.v1 import common_pb2
from lookonce.content_key import DEFAULT_TENANT, ContentKey, EncoderFingerprint, content_key, image_digest
from lookonce.embedding_meta import RowDtype
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.errors import UnavailableError
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.int8_rows import dequantise, quantise
from tests import tiny_models
from tests.decoder_svc.encoders import client, running_encoder, scripted_encoder
from tests.decoder_svc.rows.test_embedding_fetcher import NUM_ROWS, OPTIONS, open_fetcher, picture
from tests.decoder_svc.rows.test_encoder_client import Scripted

WIDTH = tiny_models.HIDDEN_SIZE
WHOLE = RowRange(0, NUM_ROWS)
KEY = content_key(image_digest(b"a"), EncoderFingerprint("f" * 64), OPTIONS, DEFAULT_TENANT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def int8_part(data: torch.Tensor, rows: RowRange, num_levels: int = 0) -> FetchedRows:
    """Returns some rows of KEY as the fetcher delivers them."""
    part = bytearray(data[rows.start : rows.stop].numpy().tobytes())
    return FetchedRows(KEY, rows, part, RowDtype.INT8_SCALED, num_levels)


def on_device(*parts: FetchedRows, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> torch.Tensor:
    """Returns the rows [NUM_ROWS, width] of a prompt that consists of the image only."""
    cache = RowCache(HostTransfer(torch.device("cpu")), dtype)
    for part in parts:
        cache.put(part)
    key: ContentKey = parts[0].key
    embeddings = torch.full((NUM_ROWS, width), float("nan"), dtype=dtype)
    cache.place(embeddings, 0, ImageItem(key, Span(0, NUM_ROWS), NUM_ROWS, OPTIONS, None), 0, NUM_ROWS)
    return embeddings


async def test_every_path_gives_the_same_rows_close_to_the_native_ones(
    folder: pathlib.Path, redis_server: EmbeddedRedis
) -> None:
    async with running_encoder(folder) as target, open_fetcher(target, None) as decoder:
        native = on_device(await decoder.fetch(picture(1), WHOLE))
    async with running_encoder(folder, row_format="int8") as target, open_fetcher(target, None) as decoder:
        info = await decoder.encoder.info()
        assert (info.dtype, info.row_bytes) == (RowDtype.INT8_SCALED, 4 + WIDTH)
        inline = await decoder.fetch(picture(1), WHOLE)
        streamed = [
            await decoder.fetch(picture(1), rows, with_data=False) for rows in (RowRange(0, 5), RowRange(5, 16))
        ]
    async with (
        running_encoder(folder, row_format="int8", redis_url=redis_server.url) as target,
        open_fetcher(target, redis_server.url) as decoder,
    ):
        await decoder.fetch(picture(1), RowRange(0, 1))
        shared = [await decoder.fetch(picture(1), rows, with_data=False) for rows in (RowRange(9, 16), RowRange(0, 9))]
        assert {part.num_encoded_rows for part in shared} == {0}
    rows = on_device(inline)
    assert torch.equal(on_device(*streamed), rows)
    assert torch.equal(on_device(*shared), rows)
    half_scale = native.abs().amax(dim=1, keepdim=True) / 127 * 0.501
    assert bool(((rows - native).abs() <= half_scale).all())
    assert not torch.equal(rows, native)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_reach_the_device_in_the_models_dtype(dtype: torch.dtype) -> None:
    rows = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    data = quantise(rows, 0).data
    parts = [int8_part(data, part) for part in (RowRange(6, 16), RowRange(0, 5), RowRange(5, 6))]
    assert torch.equal(on_device(*parts, dtype=dtype), dequantise(data, 0, dtype))


def test_levels_have_scales_of_their_own() -> None:
    rows = torch.randn(NUM_ROWS, 3 * WIDTH, generator=torch.Generator().manual_seed(2))
    rows[:, WIDTH:] *= 1000
    kept = on_device(int8_part(quantise(rows, 2).data, WHOLE, num_levels=2), width=3 * WIDTH)
    for level in (slice(0, WIDTH), slice(WIDTH, 3 * WIDTH)):
        assert (kept[:, level] - rows[:, level]).norm() / rows[:, level].norm() < 0.02


@pytest.mark.parametrize("dtype", [common_pb2.DATA_TYPE_UNSPECIFIED, 5, 99])
async def test_rows_of_an_unknown_dtype_are_refused(dtype: Any) -> None:
    class Newer(Scripted):
        def info(self) -> pb.GetEncoderInfoResponse:
            response = super().info()
            response.dtype = dtype
            return response

    async with scripted_encoder(Newer()) as target, client(target) as encoder:
        with pytest.raises(UnavailableError, match="element type"):
            await encoder.info()


async def test_a_result_of_another_dtype_than_the_encoders_is_refused() -> None:
    class Changed(Scripted):
        def results(self, request: pb.EncodeRequest) -> list[pb.EncodeResult]:
            results = super().results(request)
            results[0].embedding.num_rows = NUM_ROWS
            results[0].embedding.dtype = common_pb2.DATA_TYPE_INT8_SCALED
            return results

    async with scripted_encoder(Changed()) as target, open_fetcher(target, None) as decoder:
        with pytest.raises(UnavailableError, match="element type"):
            await decoder.fetch(b"a", WHOLE)
