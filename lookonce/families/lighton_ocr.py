"""LightOnOCR (arXiv:2601.14251): Pixtral's tower with merged patches; no break token separates the lines of rows."""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.pixtral_rows import resized, row_pixels


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.image_processing_utils import get_size_dict

    side = row_pixels(source)
    longest = source.processor.size.longest_edge
    # The folder's file sets the squares to which images are resized: single patches or merged ones.
    patch = get_size_dict(source.processor.patch_size, default_to_square=True)["height"]

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        # The merger drops a last line or column of patches that fills no square.
        lines, columns = (pixels // side for pixels in resized(width, height, longest, patch))
        if not lines or not columns:
            raise ValueError("the shorter side is less than one row after resizing")
        return ImageShape((lines * columns,))

    return ImageSizing(shape, ImageShape(((-(-longest // patch) * patch // side) ** 2,)))


def _refusal(source: FamilySource) -> str | None:
    tower = source.config.vision_config.model_type
    return None if tower == "pixtral" else f"LightOnOCR with the vision tower {tower!r} is not supported"


FAMILY = Family(
    title="LightOnOCR",
    model_type="lighton_ocr",
    architecture="LightOnOcrForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_sizes"),
    # The norm before the patch merger uses the language model's epsilon.
    text_settings=lambda config: {"rms_norm_eps": config.text_config.rms_norm_eps},
    refusal=_refusal,
)
