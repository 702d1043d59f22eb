"""Images as lines of patches with break tokens between them, for Pixtral's tower (arXiv:2410.07073, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import FamilySource, ImageShape, ImageSizing

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


def broken_rows(source: FamilySource) -> ImageSizing:
    """Returns a sizing with one token per square of merged patches.

    Each line ends with a break token, the last line with the image's end token.
    """
    side = row_pixels(source)
    longest = source.processor.size.longest_edge
    line_break = source.settings.get("image_break_token", _BREAK)
    end = source.settings.get("image_end_token", _END)

    def shape_of(lines: int, columns: int) -> ImageShape:
        parts: list[str | int] = []
        for _ in range(lines):
            parts += [columns, line_break]
        return ImageShape((*parts[:-1], end))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        resized_height, resized_width = resized(width, height, longest, side)
        if not resized_height or not resized_width:
            raise ValueError("the shorter side is less than one patch after resizing")
        return shape_of(resized_height // side, resized_width // side)

    return ImageSizing(shape, shape_of(-(-longest // side), -(-longest // side)))


def row_pixels(source: FamilySource) -> int:
    """Returns the side in pixels of the square that one row covers."""
    return int(source.config.vision_config.patch_size * getattr(source.config, "spatial_merge_size", 1))


def row_arguments(source: FamilySource, _options: ProcessorOptions) -> Mapping[str, Any]:
    """Makes the processor resize images to whole squares of merged patches."""
    return {"patch_size": row_pixels(source)}


def resized(width: int, height: int, longest: int, side: int) -> tuple[int, int]:
    """Returns (height, width) to which Pixtral's processor resizes; both are multiples of `side` pixels."""
    import numpy as np
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    # The function reads only the size of its image; this broadcast array takes no memory.
    stand_in = np.broadcast_to(np.zeros((), np.uint8), (3, height, width))
    height, width = get_resize_output_image_size(
        stand_in, size=(longest, longest), patch_size=(side, side), input_data_format="channels_first"
    )
    return height, width
