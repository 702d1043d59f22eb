"""Sizes of rows, which encoder, cache and decoder must compute alike."""

from __future__ import annotations

import pytest

from lookonce.embedding_meta import EmbeddingMeta, RowDtype


@pytest.mark.parametrize(
    ("dtype", "num_levels", "row_bytes"),
    [
        (RowDtype.FLOAT32, 0, 400),
        (RowDtype.FLOAT16, 0, 200),
        (RowDtype.BFLOAT16, 3, 800),
        # One float32 scale for each level.
        (RowDtype.INT8_SCALED, 0, 104),
        (RowDtype.INT8_SCALED, 3, 416),
    ],
)
def test_a_row_has_the_elements_of_all_levels_and_their_scales(
    dtype: RowDtype, num_levels: int, row_bytes: int
) -> None:
    meta = EmbeddingMeta(7, 100, num_levels, dtype, image_width=640, image_height=480)
    assert meta.row_bytes == row_bytes
    assert meta.size_bytes == 7 * row_bytes


def test_every_element_type_has_a_size() -> None:
    assert {dtype: dtype.item_bytes for dtype in RowDtype} == {
        RowDtype.FLOAT32: 4,
        RowDtype.FLOAT16: 2,
        RowDtype.BFLOAT16: 2,
        RowDtype.INT8_SCALED: 1,
    }
