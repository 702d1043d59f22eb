"""Cosmos 3 Edge (`cosmos3_edge`): sizes of images as in GLM-4.1V, but of one frame, and M-RoPE."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import glm4v
from lookonce.families.base import FamilySource


def _refusal(source: FamilySource) -> str | None:
    processor, vision = source.processor, source.config.vision_config
    found = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    wanted = (vision.patch_size, vision.spatial_merge_size, 1)
    if found != wanted:
        return (
            f"its image processor has patch_size, merge_size and temporal_patch_size {found}, but its vision tower "
            f"takes {wanted}"
        )
    return None


FAMILY = replace(
    glm4v.FAMILY,
    title="Cosmos 3 Edge",
    model_type="cosmos3_edge",
    architecture="Cosmos3EdgeForConditionalGeneration",
    # Frames of videos are encoded one by one, but their size depends on their number.
    video=None,
    refusal=_refusal,
)
