"""GLM-4.6V's classes under the model type `glmga`: its layout, with higher bounds of a video's pixels."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import glm4v, glm46v
from lookonce.families.base import FamilySource


def _refusal(source: FamilySource) -> str | None:
    # transformers multiplies the unit of sizes by it in the variants of its processors with torchvision alone.
    for kind, factor in (
        ("image", source.processor.patch_expand_factor),
        ("video", source.video.get("patch_expand_factor", 1)),
    ):
        if factor not in (1, None):
            return f"its {kind} processor has a patch_expand_factor of {factor!r}, but only 1 is served"
    return None


_VIDEO_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 55_790}

FAMILY = replace(
    glm46v.FAMILY,
    title="GLM-GA",
    model_type="glmga",
    video=replace(glm46v.VIDEO, defaults={**glm4v.VIDEO.defaults, "size": _VIDEO_SIZE}),
    refusal=_refusal,
)
