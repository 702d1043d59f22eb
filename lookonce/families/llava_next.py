"""LLaVA-NeXT: the whole image, then its tiles on the best-fitting canvas, with a newline row after each line.

https://llava-vl.github.io/blog/2024-01-30-llava-next ("AnyRes").
"""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing


def tile_sizing(source: FamilySource, side: int) -> ImageSizing:
    """Returns the sizing of this layout with `side` squared rows for the whole image and for each tile."""
    resolutions = source.processor.image_grid_pinpoints
    tile = source.config.vision_config.image_size

    def shape_of(lines: int, columns: int) -> ImageShape:
        return ImageShape((side * side + lines * (columns + 1),))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        canvas_height, canvas_width = sizing.best_resolution(width, height, resolutions)
        return shape_of(*sizing.unpadded_grid(width, height, canvas_height // tile * side, canvas_width // tile * side))

    largest = max((shape_of(h // tile * side, w // tile * side) for h, w in resolutions), key=lambda s: s.num_rows)
    return ImageSizing(shape, largest)


def _sizing(source: FamilySource) -> ImageSizing:
    return tile_sizing(source, sizing.square_patches(source.config.vision_config))


def _refusal(source: FamilySource) -> str | None:
    if sizing.has_class_row(source.config.vision_config) != (source.config.vision_feature_select_strategy == "default"):
        return "a model with LLaVA-NeXT's layout that keeps a class row, or drops a patch, is not supported"
    return None


FAMILY = Family(
    title="LLaVA-NeXT",
    model_type="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_sizes"),
    refusal=_refusal,
)
