"""Images as rows of patches with break tokens between them: Pixtral's tower (arXiv:2410.07073, section 2.2)."""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import FamilySource, ImageShape, ImageSizing

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


def broken_rows(source: FamilySource, row_pixels: int) -> ImageSizing:
    """One token per square of `row_pixels`; each line of them ends with a break, the last with the image's end."""
    processor = source.processor
    line_break = source.settings.get("image_break_token", _BREAK)
    end = source.settings.get("image_end_token", _END)

    def shape_of(lines: int, columns: int) -> ImageShape:
        parts: list[str | int] = []
        for _ in range(lines):
            parts += [columns, line_break]
        parts[-1] = end
        return ImageShape(tuple(parts))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        resized_height, resized_width = _resized(processor, width, height)
        return shape_of(resized_height // row_pixels, resized_width // row_pixels)

    side = processor.size.longest_edge // row_pixels
    return ImageSizing(shape, shape_of(side, side))


def _resized(processor: object, width: int, height: int) -> tuple[int, int]:
    """(height, width) that the processor resizes to."""
    import numpy as np
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    # The function asks an image for its size and nothing else; this one has no memory of its own.
    stand_in = np.broadcast_to(np.zeros((), np.uint8), (3, height, width))
    longest = processor.size.longest_edge  # type: ignore[attr-defined]
    patch = processor.patch_size  # type: ignore[attr-defined]
    patch_size = (patch["height"], patch["width"]) if isinstance(patch, dict) else (patch.height, patch.width)
    height, width = get_resize_output_image_size(
        stand_in, size=(longest, longest), patch_size=patch_size, input_data_format="channels_first"
    )
    return height, width
