"""Images as rows of patches with break tokens between them: Pixtral's tower (arXiv:2410.07073, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import FamilySource, ImageShape, ImageSizing

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


def broken_rows(source: FamilySource) -> ImageSizing:
    """One token per square of merged patches; each line of them ends with a break, the last with the image's end."""
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
        resized_height, resized_width = _resized(width, height, longest, side)
        if not resized_height or not resized_width:
            raise ValueError("nothing is left of the shorter side")
        return shape_of(resized_height // side, resized_width // side)

    return ImageSizing(shape, shape_of(-(-longest // side), -(-longest // side)))


def row_pixels(source: FamilySource) -> int:
    """Side in pixels of the square that a row stands for."""
    return int(source.config.vision_config.patch_size * getattr(source.config, "spatial_merge_size", 1))


def row_arguments(source: FamilySource, _options: ProcessorOptions) -> Mapping[str, Any]:
    """Images are resized to whole squares of merged patches."""
    return {"patch_size": row_pixels(source)}


def _resized(width: int, height: int, longest: int, side: int) -> tuple[int, int]:
    """(height, width) that the processor resizes to."""
    import numpy as np
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    # The function asks an image for its size and nothing else; this one takes no memory.
    stand_in = np.broadcast_to(np.zeros((), np.uint8), (3, height, width))
    height, width = get_resize_output_image_size(
        stand_in, size=(longest, longest), patch_size=(side, side), input_data_format="channels_first"
    )
    return height, width
