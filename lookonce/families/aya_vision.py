"""Aya Vision (arXiv:2505.08751): tiles named by number, then the whole image, between two markers."""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.internvl import tile_arguments

_PLACEHOLDER = "<image>"


def _sizing(source: FamilySource) -> ImageSizing:
    processor, settings = source.processor, source.settings
    pixels_per_row = settings.get("patch_size", 28) * settings.get("downsample_factor", 1)
    rows_per_tile = (settings.get("img_size", 364) // pixels_per_row) ** 2
    begin = settings.get("start_of_img_token", "<|START_OF_IMG|>")
    end = settings.get("end_of_img_token", "<|END_OF_IMG|>")
    tile, whole = settings.get("tile_token", "TILE"), settings.get("tile_global_token", "TILE_GLOBAL")

    def shape_of(num_tiles: int) -> ImageShape:
        parts: list[str | int] = []
        for number in range(1, num_tiles):
            parts += [f"{tile}_{number}", rows_per_tile]
        parts += [whole, rows_per_tile, end]
        return ImageShape((f"{begin}{parts[0]}", *parts[1:]))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        return shape_of(processor.get_number_of_image_patches(height, width, tile_arguments(source, options)))

    return ImageSizing(shape, shape_of(1 + processor.max_patches))


FAMILY = Family(
    title="Aya Vision",
    model_type="aya_vision",
    architecture="AyaVisionForConditionalGeneration",
    sizing=_sizing,
    placeholder=lambda source: source.settings.get("image_token", _PLACEHOLDER),
    processor_arguments=tile_arguments,
)
