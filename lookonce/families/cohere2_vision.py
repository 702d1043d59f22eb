"""Command A Vision (text half: arXiv:2504.00698): tiles of one size, and the whole image when there are several."""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.sizing import square_patches


def _sizing(source: FamilySource) -> ImageSizing:
    processor, tokens = source.processor, source.tokens
    begin, end, line_break = (tokens[f"{name}_token"] for name in ("boi", "eoi", "img_line_break"))
    rows_per_tile = _rows_per_side(source) ** 2

    def shape_of(num_tiles: int) -> ImageShape:
        return ImageShape((begin, *(rows_per_tile, line_break) * num_tiles, end))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        return shape_of(processor.get_number_of_image_patches(height, width))

    has_tiles = processor.crop_to_patches and processor.max_patches > 1
    return ImageSizing(shape, shape_of(1 + processor.max_patches if has_tiles else 1))


def _rows_per_side(source: FamilySource) -> int:
    return square_patches(source.config.vision_config) // int(source.config.downsample_factor)


def _refusal(source: FamilySource) -> str | None:
    processor, vision = source.processor, source.config.vision_config
    size, side, factor = processor.size, square_patches(vision), source.config.downsample_factor
    if size.height != vision.image_size or size.width != vision.image_size:
        return (
            f"its image processor makes tiles of {size.height} × {size.width} pixels, but its tower takes "
            f"{vision.image_size} × {vision.image_size}"
        )
    if side % factor:
        return f"its tower has {side} × {side} patches, which the downsample_factor of {factor} does not divide"
    if processor.patch_size != side // factor:
        return (
            f"its processor writes {processor.patch_size} × {processor.patch_size} tokens for a tile (patch_size), but "
            f"the model makes {side // factor} × {side // factor} rows"
        )
    if not (processor.crop_to_patches or processor.do_resize):
        return "its image processor neither crops to tiles (crop_to_patches) nor resizes (do_resize)"
    return None


FAMILY = Family(
    title="Command A Vision",
    model_type="cohere2_vision",
    architecture="Cohere2VisionForConditionalGeneration",
    sizing=_sizing,
    needs_torchvision=True,
    refusal=_refusal,
)
