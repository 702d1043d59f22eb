"""Gemma 4: rows by size, one per square of 3 × 3 patches, between markers. Most layers have a window.

Larger models let the rows of an image see each other, in layers with a window alone. In smaller ones, late layers read
the keys and values of earlier ones, and each layer adds an embedding of the token. A frame of a video is an image with
fewer rows, with its time before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, FrameRule, FrameSizing, ImageShape, ImageSizing, Mask
from lookonce.families.single_frames import timestamp


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


def _frame_sizing(source: FamilySource, settings: Mapping[str, Any]) -> FrameSizing:
    from transformers.models.gemma4 import image_processing_pil_gemma4 as pil

    processor, most_rows = source.processor, settings["max_soft_tokens"]
    patch, side = processor.patch_size, processor.pooling_kernel_size
    for name in ("patch_size", "pooling_kernel_size"):
        if settings.get(name, getattr(processor, name)) != getattr(processor, name):
            raise ValueError(f"{name} is {settings[name]} for videos, but {getattr(processor, name)} for images")
    if most_rows not in pil._SUPPORTED_SOFT_TOKENS:
        raise ValueError(f"max_soft_tokens is {most_rows} for videos, not one of {pil._SUPPORTED_SOFT_TOKENS}")

    def size(width: int, height: int) -> tuple[int, int]:
        resized_height, resized_width = pil.get_aspect_ratio_preserving_size(
            height, width, patch, most_rows * side**2, side
        )
        return resized_width, resized_height

    return FrameSizing(size, (patch * side, patch * side), most_units=most_rows)


def _frame_texts(source: FamilySource, index: int, _num_frames: int, fps: float) -> tuple[str, str]:
    begin, end = source.tokens["boi_token"], source.tokens["eoi_token"]
    return f"{' ' if index else ''}{timestamp(index, fps)} {begin}", end


VIDEO = FrameRule(
    defaults={"max_soft_tokens": 70, "resample": 3, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]},
    sizing=_frame_sizing,
    arguments=lambda settings: {"max_soft_tokens": settings["max_soft_tokens"]},
    texts=_frame_texts,
)


def _padded_input_ids(config: Any) -> tuple[int, ...]:
    ids = (config.image_token_id, config.video_token_id, config.audio_token_id)
    return tuple(token_id for token_id in ids if token_id is not None)


def _refusal(source: FamilySource) -> str | None:
    if source.config.vision_config is None:
        return "its config.json has no vision tower"
    text = source.config.text_config
    if not isinstance(text.pad_token_id, int) or not 0 <= text.pad_token_id < text.vocab_size:
        return f"pad_token_id of its text model is {text.pad_token_id}, but must be an id of the vocabulary"
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
    video=VIDEO,
    refusal=_refusal,
)
