"""Gemma 4: rows by size, one per square of 3 × 3 patches, between markers. Most layers have a window.

Larger models let the rows of an image see each other, in layers with a window alone. In smaller ones, late layers read
the keys and values of earlier ones, and each layer adds an embedding of the token.
"""

from __future__ import annotations

from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing, Mask


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    processor = source.processor
    patch, side = processor.patch_size, processor.pooling_kernel_size
    begin, end = source.tokens["boi_token"], source.tokens["eoi_token"]

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        most = processor.max_soft_tokens * side**2
        resized_height, resized_width = get_aspect_ratio_preserving_size(height, width, patch, most, side)
        return ImageShape((begin, resized_height * resized_width // (patch * side) ** 2, end))

    return ImageSizing(shape, ImageShape((begin, processor.max_soft_tokens, end)))


def _padded_input_ids(config: Any) -> tuple[int, ...]:
    return config.image_token_id, config.video_token_id, config.audio_token_id


def _refusal(source: FamilySource) -> str | None:
    if source.config.vision_config is None:
        return "its config.json has no vision tower"
    return None if source.processor.do_resize else "an image processor that does not resize is not supported"


FAMILY = Family(
    title="Gemma 4",
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_position_ids"),
    mask=Mask.IMAGE,
    is_causal=lambda config: config.text_config.use_bidirectional_attention != "vision",
    padded_input_ids=_padded_input_ids,
    refusal=_refusal,
)
