"""InternVL 3 (arXiv:2504.10479): tiles of one size, and the whole image when there are several, between markers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, FrameRule, FrameSizing, ImageShape, ImageSizing
from lookonce.families.single_frames import CLIP_PIXELS, fixed_size


def _sizing(source: FamilySource) -> ImageSizing:
    rows_per_tile = source.config.image_seq_length
    begin, end = source.tokens["start_image_token"], source.tokens["end_image_token"]
    processor = source.processor

    def shape_of(num_tiles: int) -> ImageShape:
        return ImageShape((begin, rows_per_tile * num_tiles, end))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        return shape_of(processor.get_number_of_image_patches(height, width, tile_arguments(source, options)))

    return ImageSizing(shape, shape_of(1 + processor.max_patches))


def tile_arguments(_source: FamilySource, _options: ProcessorOptions) -> Mapping[str, Any]:
    """Switches tiling on, as the models' own processors do; the image processor's file may leave it open."""
    return {"crop_to_patches": True}


def _frame_sizing(source: FamilySource, settings: Mapping[str, Any]) -> FrameSizing:
    return fixed_size(settings, source.config.vision_config.image_size[0], source.config.image_seq_length)


def _frame_texts(source: FamilySource, index: int, num_frames: int, _fps: float) -> tuple[str, str]:
    begin, end = source.tokens["start_image_token"], source.tokens["end_image_token"]
    return f"Frame{index + 1}: {begin}", end + ("\n" if index < num_frames - 1 else "")


VIDEO = FrameRule(
    defaults={**CLIP_PIXELS, "size": {"height": 384, "width": 384}},
    sizing=_frame_sizing,
    arguments=lambda settings: {"size": settings["size"], "crop_to_patches": False},
    placeholder=lambda source: source.tokens.get("video_token"),
    texts=_frame_texts,
)

FAMILY = Family(
    title="InternVL 3",
    model_type="internvl",
    architecture="InternVLForConditionalGeneration",
    sizing=_sizing,
    processor_arguments=tile_arguments,
    video=VIDEO,
)
