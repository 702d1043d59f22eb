"""LLaVA-NeXT-Video: LLaVA-NeXT trained on videos as well, of whose frames two by two rows become one.

https://llava-vl.github.io/blog/2024-04-30-llava-next-video.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lookonce.families import llava_next, sizing
from lookonce.families.base import FamilySource, FrameRule, FrameSizing
from lookonce.families.single_frames import CLIP_PIXELS, fixed_size, plain_arguments, plain_processor

# The whole processor counts this many patches for each row, whatever the pooling of the configuration is.
_PATCHES_PER_ROW = 4


def _frame_sizing(source: FamilySource, settings: Mapping[str, Any]) -> FrameSizing:
    config = source.config
    side, stride = sizing.square_patches(config.vision_config), config.spatial_pool_stride
    num_rows = (side // stride) ** 2
    if num_rows != side * side // _PATCHES_PER_ROW:
        raise ValueError(f"spatial_pool_stride {stride} does not make {side} × {side} patches a quarter of the rows")
    return fixed_size(settings, config.vision_config.image_size, num_rows)


VIDEO = FrameRule(
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
)

FAMILY = replace(
    llava_next.FAMILY,
    title="LLaVA-NeXT-Video",
    model_type="llava_next_video",
    architecture="LlavaNextVideoForConditionalGeneration",
    video=VIDEO,
)
