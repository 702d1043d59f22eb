"""Video-LLaVA (arXiv:2311.10122): LLaVA 1.5's squares, and a second tower for the frames of videos, one by one.

A frame keeps the class row of its tower, which an image drops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, FrameRule, FrameSizing, ImageShape, ImageSizing
from lookonce.families.single_frames import CLIP_PIXELS, fixed_size, plain_arguments, plain_processor

_TOWER = "clip_vision_model"


def _sizing(source: FamilySource) -> ImageSizing:
    config = source.config
    is_dropped = config.vision_feature_select_strategy == "default"
    return sizing.constant(ImageShape((sizing.square_patches(config.vision_config) ** 2 + 1 - is_dropped,)))


def _arguments(_source: FamilySource, _options: ProcessorOptions) -> Mapping[str, Any]:
    # Without the first, pixels have the name that they had in transformers 4. Without the second, the processor takes
    # the height of images that are one or three pixels high for the number of channels.
    return {"return_legacy_image_output": False, "input_data_format": "channels_last"}


def _frame_sizing(source: FamilySource, settings: Mapping[str, Any]) -> FrameSizing:
    vision = source.config.vision_config
    return fixed_size(settings, vision.image_size, sizing.square_patches(vision) ** 2 + 1)


def _refusal(source: FamilySource) -> str | None:
    tower = source.config.vision_config.model_type
    return None if tower == _TOWER else f"Video-LLaVA with the vision tower {tower!r} is not supported"


FAMILY = Family(
    title="Video-LLaVA",
    model_type="video_llava",
    architecture="VideoLlavaForConditionalGeneration",
    sizing=_sizing,
    processor_arguments=_arguments,
    video=FrameRule(
        defaults={
            **CLIP_PIXELS,
            "size": {"shortest_edge": 224},
            "do_center_crop": True,
            "crop_size": {"height": 224, "width": 224},
        },
        sizing=_frame_sizing,
        arguments=plain_arguments,
        processor=plain_processor,
        has_video_method=True,
    ),
    refusal=_refusal,
)
