"""Arithmetic from image size to rows that several families share. Uses transformers' own functions where they exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import FamilySource, ImageShape, ImageSizing

# Largest ratio of sides that the patch processors accept.
MAX_ASPECT = 200
ELONGATED_PIXELS = 1000


def constant(shape: ImageShape) -> ImageSizing:
    """Returns a sizing in which every image has the same expansion."""
    return ImageSizing(lambda width, height, options: shape, shape)


def patch_grid(processor: Any, smart_resize: Callable[..., tuple[int, int]], frames: int = 1) -> ImageSizing:
    """Returns a sizing with one row per merged patch, for processors that resize an image into pixel bounds.

    `smart_resize` is the processor's: (height, width, factor, least pixels, most pixels) → (height, width). `frames` is
    the number of frames that a still image counts as, if the bounds are on pixels times frames.
    """
    factor = processor.patch_size * processor.merge_size

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        least, most = pixel_bounds(processor, options, frames)
        resized_height, resized_width = smart_resize(height, width, factor, least, most)
        return grid_shape(resized_height // factor, resized_width // factor)

    least, most = (edge // frames for edge in (processor.size.shortest_edge, processor.size.longest_edge))
    most_rows = most_grid_rows(least, most, factor)
    # The most elongated images are at least one patch high, so they may exceed the pixel bound.
    elongated = [shape(ELONGATED_PIXELS * MAX_ASPECT, ELONGATED_PIXELS, ProcessorOptions())]
    return ImageSizing(shape, max([grid_shape(1, most_rows), *elongated], key=lambda one: one.num_rows))


def most_grid_rows(least: int, most: int, factor: int) -> int:
    """Returns the rows of the largest grid between `least` and `most` pixels, with `factor` squared pixels per row.

    An image below `least` is enlarged with both sides rounded up, which may exceed `most` if the bounds are close. The
    most elongated images, whose shorter side is at least one row, are not considered here.
    """
    rows = -(-least // factor**2)
    longer = math.isqrt(rows * MAX_ASPECT) + 1
    enlarged = rows + longer + rows // longer + 1
    return max(1, most // factor**2, enlarged)


def pixel_bounds(processor: Any, options: ProcessorOptions, frames: int = 1) -> tuple[int, int]:
    """Returns the fewest and most pixels of a resized image, times frames."""
    most = processor.size.longest_edge if options.max_pixels is None else options.max_pixels * frames
    return processor.size.shortest_edge, most


def pixel_size(source: FamilySource, options: ProcessorOptions, frames: int = 1) -> dict[str, Any]:
    """Returns the `size` argument that bounds an image's pixels."""
    least, most = pixel_bounds(source.processor, options, frames)
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def unpadded_grid(width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
    """Returns the rows and columns of a feature grid without the bars that pad an image to the grid's proportions.

    Rounds like the models' own unpadding (LLaVA-NeXT): to seven digits, then down.
    """
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        return rows - 2 * ((rows - kept) // 2), columns
    kept = int(round(width * (rows / height), 7))
    return rows, columns - 2 * ((columns - kept) // 2)


def best_resolution(width: int, height: int, resolutions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Returns (height, width) of the canvas on which an image is tiled."""
    from transformers.image_processing_utils import select_best_resolution

    best_height, best_width = select_best_resolution((height, width), resolutions)
    return best_height, best_width


def square_patches(vision: Any) -> int:
    """Returns the number of patches along one side of a tower's square input."""
    return int(vision.image_size // vision.patch_size)


def has_class_row(vision: Any) -> bool:
    """Whether the tower's output starts with a class row."""
    return bool(vision.model_type == "clip_vision_model")


def grid_shape(height: int, width: int) -> ImageShape:
    """Returns the expansion of a grid with one row per cell."""
    return ImageShape((height * width,), (1, height, width))
