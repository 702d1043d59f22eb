"""DeepSeek-OCR 2 (arXiv:2601.20552): an encoder turns SAM's patches into learned queries, one row for each.

A page has the rows of its tiles if it is larger than one tile, then those of the whole page, then a separator's row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing

# The model has learned queries for 12 × 12 patches (tiles of 768 pixels) and for 16 × 16 (pages of 1024 pixels).
_NUM_QUERIES = (144, 256)
# Bounds on the number of tiles in the models' own processor, which overrides the image processor's file.
_FEWEST_TILES, _MOST_TILES = 2, 6


def _tile_arguments(_source: FamilySource, _options: ProcessorOptions) -> Mapping[str, Any]:
    return {"crop_to_patches": True, "min_patches": _FEWEST_TILES, "max_patches": _MOST_TILES}


def _num_patches(source: FamilySource, pixels: int) -> int:
    """Returns the number of SAM's patches of a square image, after two convolutions that halve the sides."""
    side = -(-(pixels // source.config.vision_config.sam_config.patch_size) // 4)
    return int(side * side)


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import get_optimal_tiled_canvas

    side = source.processor.tile_size
    page, tile = (_num_patches(source, pixels) for pixels in (source.processor.size.height, side))

    def shape_of(num_tiles: int) -> ImageShape:
        return ImageShape((num_tiles * tile + page + 1,))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        # The processor's own count (get_number_of_image_patches) ignores that small pages have no tiles.
        if max(width, height) <= side:
            return shape_of(0)
        columns, lines = get_optimal_tiled_canvas((height, width), (side, side), _FEWEST_TILES, _MOST_TILES)
        return shape_of(columns * lines)

    return ImageSizing(shape, shape_of(_MOST_TILES))


def _refusal(source: FamilySource) -> str | None:
    for pixels in (source.processor.size.height, source.processor.tile_size):
        if (found := _num_patches(source, pixels)) not in _NUM_QUERIES:
            return f"{pixels} pixels give {found} patches, but the model has queries for {_NUM_QUERIES} only"
    return None


FAMILY = Family(
    title="DeepSeek-OCR 2",
    model_type="deepseek_ocr2",
    architecture="DeepseekOcr2ForConditionalGeneration",
    sizing=_sizing,
    # Pages without tiles have no `pixel_values_local`.
    inputs=("pixel_values", "pixel_values_local", "num_local_patches"),
    processor_arguments=_tile_arguments,
    refusal=_refusal,
)
