"""Arithmetic from image size to rows that several families share. transformers' own functions do what they offer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import FamilySource, ImageShape, ImageSizing

# What the patch processors refuse is more elongated than this.
MAX_ASPECT = 200
ELONGATED_PIXELS = 1000


def constant(shape: ImageShape) -> ImageSizing:
    """Every image becomes the same."""
    return ImageSizing(lambda width, height, options: shape, shape)


def patch_grid(processor: Any, smart_resize: Callable[..., tuple[int, int]], frames: int = 1) -> ImageSizing:
    """One row per merged patch of an image resized to between so many pixels.

    `smart_resize` is the processor's, (height, width, factor, least, most pixels) → (height, width). `frames` is what
    one still image counts as where the bounds are on pixels times frames.
    """
    factor = processor.patch_size * processor.merge_size

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        least, most = pixel_bounds(processor, options, frames)
        resized_height, resized_width = smart_resize(height, width, factor, least, most)
        return grid_shape(resized_height // factor, resized_width // factor)

    least, most = (edge // frames for edge in (processor.size.shortest_edge, processor.size.longest_edge))
    most_rows = most_grid_rows(least, most, factor)
    # The most elongated images are at least one patch high, which may make them larger than the bound.
    elongated = [shape(ELONGATED_PIXELS * MAX_ASPECT, ELONGATED_PIXELS, ProcessorOptions())]
    return ImageSizing(shape, max([grid_shape(1, most_rows), *elongated], key=lambda one: one.num_rows))


def most_grid_rows(least: int, most: int, factor: int) -> int:
    """Rows of the largest grid with so many pixels at least and at most, of which `factor` squared make a row.

    An image below the least is enlarged with both sides rounded up, which may be more than the most where those are
    near each other. The most elongated images, of which a side is one row at least, are not looked at.
    """
    rows = -(-least // factor**2)
    longer = math.isqrt(rows * MAX_ASPECT) + 1
    enlarged = rows + longer + rows // longer + 1
    return max(1, most // factor**2, enlarged)


def pixel_bounds(processor: Any, options: ProcessorOptions, frames: int = 1) -> tuple[int, int]:
    """Fewest and most pixels, times frames, of a resized image."""
    most = processor.size.longest_edge if options.max_pixels is None else options.max_pixels * frames
    return processor.size.shortest_edge, most


def pixel_size(source: FamilySource, options: ProcessorOptions, frames: int = 1) -> dict[str, Any]:
    """The `size` argument that bounds an image's pixels."""
    least, most = pixel_bounds(source.processor, options, frames)
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def unpadded_grid(width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
    """What is left of a grid of features when the bars that pad an image to the grid's proportions are cut off.

    Widths and heights round as the models' own unpadding does (LLaVA-NeXT): to seven digits, then down.
    """
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        return rows - 2 * ((rows - kept) // 2), columns
    kept = int(round(width * (rows / height), 7))
    return rows, columns - 2 * ((columns - kept) // 2)


def best_resolution(width: int, height: int, resolutions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(height, width) of the canvas that an image is tiled on."""
    from transformers.image_processing_utils import select_best_resolution

    best_height, best_width = select_best_resolution((height, width), resolutions)
    return best_height, best_width


def square_patches(vision: Any) -> int:
    """Patches along one side of a tower's square input."""
    return int(vision.image_size // vision.patch_size)


def has_class_row(vision: Any) -> bool:
    """Whether the tower puts a class row in front of the patches."""
    return bool(vision.model_type == "clip_vision_model")


def side_of(num_rows: int) -> int:
    """Side of a square of so many rows. Raises ValueError when it is none."""
    side = math.isqrt(num_rows)
    if side * side != num_rows:
        raise ValueError(f"{num_rows} rows are no square")
    return side


def grid_shape(height: int, width: int) -> ImageShape:
    """A row per cell."""
    return ImageShape((height * width,), (1, height, width))
