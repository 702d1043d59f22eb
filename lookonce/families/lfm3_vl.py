"""LFM3-VL (`lfm3_vl`): Qwen2-VL's sizes of images and one axis of positions; short convolutions in both halves.

Its processor leaves the marks around a video's placeholder in place, and writes others around each pair of frames.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen2_vl, qwen3_vl
from lookonce.families.base import FamilySource, PositionAxes


def _refusal(source: FamilySource) -> str | None:
    processor, vision = source.processor, source.config.vision_config
    found = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    wanted = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if found != wanted:
        return (
            f"its image processor has patch_size, merge_size and temporal_patch_size {found}, but its vision tower "
            f"takes {wanted}"
        )
    if vision.conv_kernel_size % 2 == 0:
        return f"the convolutions of its vision tower have an even conv_kernel_size of {vision.conv_kernel_size}"
    return None


FAMILY = replace(
    qwen2_vl.FAMILY,
    title="LFM3-VL",
    model_type="lfm3_vl",
    architecture="Lfm3VlForConditionalGeneration",
    axes=PositionAxes.SEQUENCE,
    video=replace(qwen3_vl.VIDEO, placeholder=lambda token: token),
    refusal=_refusal,
)
