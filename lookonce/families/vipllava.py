"""ViP-LLaVA (arXiv:2312.00784): LLaVA 1.5's square; a row joins the features of several tower layers."""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing


def _sizing(source: FamilySource) -> ImageSizing:
    return sizing.constant(ImageShape((sizing.square_patches(source.config.vision_config) ** 2,)))


def _refusal(source: FamilySource) -> str | None:
    if sizing.has_class_row(source.config.vision_config):
        return None
    # The model drops the first row of any tower.
    return f"ViP-LLaVA with the vision tower {source.config.vision_config.model_type!r} is not supported"


FAMILY = Family(
    title="ViP-LLaVA",
    model_type="vipllava",
    architecture="VipLlavaForConditionalGeneration",
    sizing=_sizing,
    refusal=_refusal,
)
