"""Qwen2-VL (arXiv:2409.12191): a row per merged patch of an image of any size, and M-RoPE."""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageSizing, PositionAxes


def qwen_sizing(source: FamilySource) -> ImageSizing:
    """Of the processor that all Qwen-VL models share."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return sizing.patch_grid(source.processor, smart_resize)


FAMILY = Family(
    title="Qwen2-VL",
    model_type="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    sizing=qwen_sizing,
    inputs=("pixel_values", "image_grid_thw"),
    axes=PositionAxes.MROPE,
    has_max_pixels=True,
    processor_arguments=sizing.pixel_size,
)
