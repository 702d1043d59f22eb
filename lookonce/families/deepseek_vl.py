"""DeepSeek-VL (arXiv:2403.05525): a padded square of a fixed size, one row per patch."""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing


def _sizing(source: FamilySource) -> ImageSizing:
    return sizing.constant(ImageShape((sizing.square_patches(source.config.vision_config) ** 2,)))


FAMILY = Family(
    title="DeepSeek-VL",
    model_type="deepseek_vl",
    architecture="DeepseekVLForConditionalGeneration",
    sizing=_sizing,
)
