"""Granite Docling, a successor of SmolDocling (arXiv:2503.11576): Idefics3's markers around tiles, and feature levels.

A page of one tile has no second view. The folder's image processor chooses the coarse or the fine connector, which
gives four times as many rows.
"""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.idefics3 import MARKER, WHOLE, tile_parts

_FINE_ROWS = 4


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.granite_docling.image_processing_pil_granite_docling import (
        get_all_supported_aspect_ratios,
    )

    vision, processor = source.config.vision_config, source.processor
    num_rows = (sizing.square_patches(vision) // vision.scale_factor) ** 2 * (_FINE_ROWS if processor.fine_route else 1)

    def shape_of(lines: int, columns: int) -> ImageShape:
        parts = tile_parts(lines, columns, num_rows)
        if lines * columns > 1:
            parts += [f"\n{MARKER}{WHOLE}", num_rows, MARKER]
        return ImageShape(tuple(parts))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        return shape_of(*processor.get_tile_grid(height, width))

    if not processor.crop_to_patches or processor.max_patches <= 1:
        return ImageSizing(shape, shape_of(1, 1))
    most = max(processor.max_patches, processor.dense_max_patches)
    grids = get_all_supported_aspect_ratios(processor.min_patches, most)
    # A grid with more lines has more line breaks, so the largest image has the most lines among the most tiles.
    columns, lines = max(grids, key=lambda grid: (grid[0] * grid[1], grid[1]))
    return ImageSizing(shape, shape_of(lines, columns))


def _refusal(source: FamilySource) -> str | None:
    if source.processor.fine_route and not source.config.vision_config.use_fine_route:
        return "the image processor asks for the fine connector (fine_route), which this model does not have"
    return None


FAMILY = Family(
    title="Granite Docling",
    model_type="granite_docling",
    architecture="GraniteDoclingForConditionalGeneration",
    sizing=_sizing,
    # The mask of the fine connector is there only if the image processor asks for it.
    inputs=("pixel_values", "pixel_attention_mask", "tile_fine_mask"),
    num_levels=lambda config: len(config.vision_config.deepstack_visual_indexes),
    refusal=_refusal,
)
