"""Ovis2 (arXiv:2405.20797): a row is a mixture of a visual vocabulary; the markers around rows are words of it, too.

The whole image comes first, then its tiles line by line. The language model embeds no marker itself: the vision half
gives their rows, which are the same for every image.
"""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing, SharedRow

# In the order of the last words of the visual vocabulary.
_START, _GRID, _COLUMN, _LINE, _END = (
    SharedRow(text, index)
    for index, text in enumerate(("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"))
)
# The image processor's constant: the part of an image that its tiles must cover.
_COVERED = 0.9


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.ovis2.image_processing_pil_ovis2 import (
        get_min_tile_covering_grid,
        get_optimal_tiled_canvas,
    )

    processor, vision = source.processor, source.config.vision_config
    rows_per_tile = (sizing.square_patches(vision) // vision.hidden_stride) ** 2
    is_tiled = processor.crop_to_patches and processor.max_patches > 1
    tile = processor.size.height, processor.size.width

    def shape_of(lines: int, columns: int) -> ImageShape:
        parts: list[int | SharedRow] = [_START, rows_per_tile, _GRID]
        if lines * columns > 1:
            for _ in range(lines):
                for _ in range(columns):
                    parts += [rows_per_tile, _COLUMN]
                parts[-1] = _LINE
            parts.pop()
        return ImageShape((*parts, _END))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        if not is_tiled:
            return shape_of(1, 1)
        if processor.use_covering_area_grid:
            columns, lines = get_min_tile_covering_grid((height, width), tile[0], processor.max_patches, _COVERED)
        else:
            columns, lines = get_optimal_tiled_canvas(
                (height, width), tile, processor.min_patches, processor.max_patches
            )
        return shape_of(lines, columns)

    # The number of tiles alone determines the number of rows.
    return ImageSizing(shape, shape_of(1, processor.max_patches if is_tiled else 1))


def _refusal(source: FamilySource) -> str | None:
    vision = source.config.vision_config
    if vision.tokenize_function == "gumbel_argmax":
        return "Ovis2 that draws its visual words at random (tokenize_function 'gumbel_argmax') is not supported"
    if sizing.square_patches(vision) % vision.hidden_stride:
        return f"Ovis2 with patches that do not fill squares of {vision.hidden_stride} is not supported"
    return None


FAMILY = Family(
    title="Ovis2",
    model_type="ovis2",
    architecture="Ovis2ForConditionalGeneration",
    sizing=_sizing,
    placeholder=lambda _: "<image>",
    shared_rows=lambda output: output.visual_indicator_features,
    refusal=_refusal,
)
