"""Muse Glimmer (`muse_glimmer`): images of any size, one row per merged patch, between two markers."""

from __future__ import annotations

from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.sizing import MAX_ASPECT

# The model's processor takes these texts from no file.
_BEGIN, _END = "<|image_start|>", "<|image_end|>"


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.muse_glimmer.image_processing_muse_glimmer import smart_resize

    processor = source.processor
    side = processor.patch_size * processor.merge_size
    # An image is at least one row high, so elongated ones may exceed the processor's bound. Where its shorter side is
    # one row, an image with that aspect ratio has fewer rows than the ratio.
    most_rows = max(processor.max_image_tokens, MAX_ASPECT)

    def shape_of(num_rows: int) -> ImageShape:
        return ImageShape((_BEGIN, num_rows, _END))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        resized_height, resized_width = smart_resize(height, width, side, processor.max_image_tokens)
        num_rows = (resized_height // side) * (resized_width // side)
        if num_rows > most_rows:
            raise ValueError("the image is so elongated that it has more rows than the processor's bound")
        return shape_of(num_rows)

    return ImageSizing(shape, shape_of(most_rows))


def _refusal(source: FamilySource) -> str | None:
    processor, vision = source.processor, source.config.vision_config
    if not processor.do_resize:
        return "an image processor that does not resize is not supported"
    found = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    wanted = (vision.patch_size, vision.merge_size, vision.patch_temporal)
    if found != wanted:
        return (
            f"its image processor has patch_size, merge_size and temporal_patch_size {found}, but its vision tower "
            f"{wanted}"
        )
    return None


def _placeholders(config: Any) -> tuple[int, ...]:
    names = ("image_token_id", "video_token_id", "audio_token_id")
    found = (getattr(config, name, None) for name in names)
    return tuple(token_id for token_id in found if token_id is not None)


FAMILY = Family(
    title="Muse Glimmer",
    model_type="muse_glimmer",
    architecture="MuseGlimmerForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_grid_thw"),
    # The norm behind the projection uses the language model's epsilon.
    text_settings=lambda config: {"rms_norm_eps": config.text_config.rms_norm_eps},
    ids_embedded_as_0=_placeholders,
    needs_torchvision=True,
    refusal=_refusal,
)
