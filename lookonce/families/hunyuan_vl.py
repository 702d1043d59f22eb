"""HunyuanOCR (arXiv:2511.19575): markers around an image and after each of its lines are rows, too; XD-RoPE positions.

The language model stretches its rotary base by a constant (`alpha`): its rope type, `dynamic`, does not depend on the
batch.
"""

from __future__ import annotations

import math

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing, PositionAxes

# The rows before and after an image's grid.
_NUM_MARKERS = 2


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import smart_resize

    patches = sizing.patch_grid(source.processor, smart_resize)

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        grid = patches.shape(width, height, options).grid
        assert grid is not None, "a grid of patches has a size"
        _, lines, columns = grid
        return ImageShape((lines * (columns + 1) + _NUM_MARKERS,), (1, lines, columns + 1))

    # A high image has the most lines. Rounding down its width leaves up to twice the proportions that are accepted.
    cells = patches.largest.num_rows
    lines = min(cells, math.isqrt(2 * sizing.MAX_ASPECT * cells) + 1)
    return ImageSizing(shape, ImageShape((cells + lines + _NUM_MARKERS,)))


def _refusal(source: FamilySource) -> str | None:
    sections = source.config.text_config.rope_parameters.get("mrope_section") or ()
    num_axes = PositionAxes.XDROPE.num_axes
    if len(sections) == num_axes:
        return None
    return f"its text model has {len(sections)} rotary axes (mrope_section), but only {num_axes} are served"


FAMILY = Family(
    title="HunyuanOCR",
    model_type="hunyuan_vl",
    architecture="HunYuanVLForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_grid_thw"),
    axes=PositionAxes.XDROPE,
    has_max_pixels=True,
    processor_arguments=sizing.pixel_size,
    refusal=_refusal,
)
