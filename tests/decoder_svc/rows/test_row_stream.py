"""A stream of rows fills the buffer exactly, whatever its chunks; everything else in it is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.rows.row_stream import RowStreamReader
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ContentKey
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.errors import UnavailableError
from tests.decoder_svc.scheduling.simulation import key

ROW_BYTES = 3
NUM_ROWS = 8
KEY = key("x")
DATA = bytes(range(NUM_ROWS * ROW_BYTES))


def info(of: ContentKey = KEY, num_rows: int = NUM_ROWS, size_bytes: int = len(DATA)) -> common_pb2.EmbeddingInfo:
    named = common_pb2.ContentKey(digest=of.digest, encoder_fingerprint=of.fingerprint)
    return common_pb2.EmbeddingInfo(key=named, num_rows=num_rows, size_bytes=size_bytes)


def chunk(
    start: int, stop: int, embedding: common_pb2.EmbeddingInfo | None = None
) -> encoder_service_pb2.ReadEmbeddingResponse:
    """Rows [start, stop), with the description that the first chunk of a stream has."""
    return encoder_service_pb2.ReadEmbeddingResponse(
        embedding=info() if embedding is None else embedding,
        row_offset=start,
        data=DATA[start * ROW_BYTES : stop * ROW_BYTES],
    )


def reader(start: int = 0, stop: int = NUM_ROWS) -> tuple[RowStreamReader, bytearray]:
    buffer = bytearray((stop - start) * ROW_BYTES)
    return RowStreamReader(KEY, start, stop, memoryview(buffer)), buffer


@given(bounds=st.lists(st.integers(0, NUM_ROWS), min_size=2, max_size=5, unique=True).map(sorted))
def test_chunks_of_any_size_fill_the_buffer(bounds: list[int]) -> None:
    stream, buffer = reader(bounds[0], bounds[-1])
    for start, stop in itertools.pairwise(bounds):
        stream.take(chunk(start, stop))
    stream.finish()
    assert bytes(buffer) == DATA[bounds[0] * ROW_BYTES : bounds[-1] * ROW_BYTES]


@pytest.mark.parametrize(
    "second", [(5, 6), (3, 5), (0, 4), (4, 8)], ids=["a gap", "an overlap", "a repetition", "rows behind the range"]
)
def test_rows_out_of_order_or_range_are_refused(second: tuple[int, int]) -> None:
    stream, _ = reader(0, 6)
    stream.take(chunk(0, 4))
    with pytest.raises(UnavailableError, match="not asked for"):
        stream.take(chunk(*second))


def test_a_part_of_a_row_is_refused() -> None:
    stream, _ = reader()
    with pytest.raises(UnavailableError, match="not asked for"):
        stream.take(encoder_service_pb2.ReadEmbeddingResponse(embedding=info(), row_offset=0, data=DATA[:4]))


@pytest.mark.parametrize(
    ("embedding", "reason"),
    [
        (info(key("y")), "another image"),
        (info(num_rows=NUM_ROWS - 1, size_bytes=(NUM_ROWS - 1) * ROW_BYTES), "another shape"),
        (info(size_bytes=len(DATA) + 1), "another shape"),
    ],
    ids=["another image", "too few rows", "another row size"],
)
def test_rows_of_another_embedding_are_refused(embedding: common_pb2.EmbeddingInfo, reason: str) -> None:
    stream, buffer = reader()
    with pytest.raises(UnavailableError, match=reason):
        stream.take(chunk(0, 2, embedding))
    assert not any(buffer)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_stream_that_ends_early_is_refused(num_rows: int) -> None:
    stream, _ = reader()
    if num_rows:
        stream.take(chunk(0, num_rows))
    with pytest.raises(UnavailableError, match="before the last row"):
        stream.finish()


@pytest.mark.parametrize(("start", "stop", "num_bytes"), [(2, 2, 0), (3, 2, 3), (0, 2, 5)])
def test_a_buffer_that_cannot_hold_whole_rows_is_refused(start: int, stop: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="do not fill a buffer"):
        RowStreamReader(KEY, start, stop, memoryview(bytearray(num_bytes)))
