"""Janus (arXiv:2410.13848, 2501.17811), which understands and draws images; here it only understands them.

The rows of an image stand between two markers. The encoder loads the modules for drawing, too, but never runs them.
"""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing


def _sizing(source: FamilySource) -> ImageSizing:
    begin, end = source.tokens["boi_token"], source.tokens["eoi_token"]
    return sizing.constant(ImageShape((begin, sizing.square_patches(source.config.vision_config) ** 2, end)))


def _refusal(source: FamilySource) -> str | None:
    if source.settings.get("use_default_system_prompt"):
        return "a processor that writes its own system prompt (use_default_system_prompt) is not supported"
    return None


FAMILY = Family(
    title="Janus",
    model_type="janus",
    architecture="JanusForConditionalGeneration",
    sizing=_sizing,
    refusal=_refusal,
)
