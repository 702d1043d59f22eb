"""Shared arithmetic from image sizes to rows, against the processors and plain searches."""

from __future__ import annotations

import types
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import ImageShape

NO_OPTIONS = ProcessorOptions()
FACTOR = 28


def processor(least: int, most: int) -> types.SimpleNamespace:
    """The settings of a patch processor with rows of 28 × 28 pixels."""
    size = types.SimpleNamespace(shortest_edge=least, longest_edge=most)
    return types.SimpleNamespace(patch_size=14, merge_size=2, size=size)


def test_a_constant_sizing_ignores_the_image() -> None:
    shape = ImageShape((16,))
    sizes = sizing.constant(shape)
    assert sizes.shape(1, 1, NO_OPTIONS) is sizes.shape(900, 20, NO_OPTIONS) is sizes.largest is shape


def test_a_grid_has_one_row_per_cell() -> None:
    shape = sizing.grid_shape(3, 5)
    assert (shape.num_rows, shape.grid) == (15, (1, 3, 5))


@settings(max_examples=300)
@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    least_rows=st.integers(1, 40),
    more_rows=st.integers(0, 60),
    frames=st.sampled_from([1, 2]),
)
def test_no_image_of_a_patch_grid_has_more_rows_than_the_largest(
    width: int, height: int, least_rows: int, more_rows: int, frames: int
) -> None:
    least, most = (rows * FACTOR**2 * frames for rows in (least_rows, least_rows + more_rows))

    def resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
        resized_height, resized_width = smart_resize(height, width, factor, least // frames, most // frames)
        return resized_height, resized_width

    sizes = sizing.patch_grid(processor(least, most), resize, frames)
    if max(width, height) <= sizing.MAX_ASPECT * min(width, height):
        assert 1 <= sizes.shape(width, height, NO_OPTIONS).num_rows <= sizes.largest.num_rows
    else:
        with pytest.raises(ValueError, match="aspect ratio"):
            sizes.shape(width, height, NO_OPTIONS)


def test_max_pixels_replaces_the_upper_bound_only() -> None:
    assert sizing.pixel_bounds(processor(100, 900), NO_OPTIONS) == (100, 900)
    assert sizing.pixel_bounds(processor(100, 900), ProcessorOptions(max_pixels=300)) == (100, 300)
    assert sizing.pixel_bounds(processor(100, 900), ProcessorOptions(max_pixels=300), frames=2) == (100, 600)
    source = types.SimpleNamespace(processor=processor(100, 900))
    argument = sizing.pixel_size(source, ProcessorOptions(max_pixels=300))  # type: ignore[arg-type]
    assert argument == {"size": {"shortest_edge": 100, "longest_edge": 300}}


@pytest.mark.parametrize(
    ("size", "grid", "unpadded"),
    [
        ((100, 100), (8, 8), (8, 8)),
        ((200, 100), (8, 8), (4, 8)),
        ((100, 200), (8, 8), (8, 4)),
        ((300, 100), (8, 8), (2, 8)),
        ((100, 100), (4, 8), (4, 4)),
    ],
)
def test_bars_that_pad_an_image_to_the_grid_are_cut_off(
    size: tuple[int, int], grid: tuple[int, int], unpadded: tuple[int, int]
) -> None:
    assert sizing.unpadded_grid(*size, *grid) == unpadded


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 40), st.integers(1, 40))
def test_unpadding_never_enlarges_a_grid_and_keeps_one_side(width: int, height: int, rows: int, columns: int) -> None:
    kept_rows, kept_columns = sizing.unpadded_grid(width, height, rows, columns)
    assert 0 <= kept_rows <= rows
    assert 0 <= kept_columns <= columns
    assert kept_rows == rows or kept_columns == columns


@pytest.mark.parametrize(("size", "canvas"), [((100, 100), (56, 56)), ((400, 100), (56, 112)), ((100, 400), (112, 56))])
def test_the_best_canvas_has_the_proportions_of_the_image(size: tuple[int, int], canvas: tuple[int, int]) -> None:
    canvases: Sequence[Sequence[int]] = [[56, 56], [56, 112], [112, 56]]
    assert sizing.best_resolution(*size, canvases) == canvas


def test_only_clip_towers_have_a_class_row() -> None:
    assert sizing.has_class_row(types.SimpleNamespace(model_type="clip_vision_model"))
    assert not sizing.has_class_row(types.SimpleNamespace(model_type="siglip_vision_model"))
    assert sizing.square_patches(types.SimpleNamespace(image_size=56, patch_size=14)) == 4
