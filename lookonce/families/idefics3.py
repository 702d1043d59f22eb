"""Idefics3 (arXiv:2408.12637): tiles named by line and column, then the whole image, each between marker tokens."""

from __future__ import annotations

from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing

MARKER, WHOLE = "<fake_token_around_image>", "<global-img>"


def split_sizing(source: FamilySource) -> ImageSizing:
    """Returns the sizing of the image processors of Idefics3 and SmolVLM."""
    processor, num_rows = source.processor, rows_per_tile(source.config)
    whole = (f"{MARKER}{WHOLE}", num_rows, MARKER)

    def shape_of(lines: int, columns: int) -> ImageShape:
        if not lines and not columns:
            return ImageShape(whole)
        return ImageShape((*tile_parts(lines, columns, num_rows), "\n" + whole[0], *whole[1:]))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        _, lines, columns = processor.get_number_of_image_patches(height, width)
        return shape_of(lines, columns)

    most = -(-processor.size.longest_edge // processor.max_image_size["longest_edge"])
    return ImageSizing(shape, shape_of(most, most) if processor.do_image_splitting else shape_of(0, 0))


def rows_per_tile(config: Any) -> int:
    """Returns the rows of a tile, and of the whole image: pixel shuffle merges squares of patches into one row."""
    side: int = config.vision_config.image_size // config.vision_config.patch_size
    return side**2 // int(config.scale_factor) ** 2


def tile_parts(lines: int, columns: int, num_rows: int) -> list[str | int]:
    """Returns the parts of an image's tiles, each with `num_rows` rows; a line of tiles ends with a line break."""
    parts: list[str | int] = []
    for line in range(1, lines + 1):
        for column in range(1, columns + 1):
            parts += [f"{MARKER}<row_{line}_col_{column}>", num_rows]
        parts.append("\n")
    return parts


FAMILY = Family(
    title="Idefics3",
    model_type="idefics3",
    architecture="Idefics3ForConditionalGeneration",
    sizing=split_sizing,
    inputs=("pixel_values", "pixel_attention_mask"),
)
