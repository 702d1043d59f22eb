"""Gemma 3 (arXiv:2503.19786): 256 rows per image that see each other, between markers. Most layers have a window."""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing, Mask


def _sizing(source: FamilySource) -> ImageSizing:
    begin, end = source.tokens["boi_token"], source.tokens["eoi_token"]
    return sizing.constant(ImageShape((f"\n\n{begin}", source.config.mm_tokens_per_image, f"{end}\n\n")))


def _refusal(source: FamilySource) -> str | None:
    return "pan and scan is not supported" if source.processor.do_pan_and_scan else None


FAMILY = Family(
    title="Gemma 3",
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    sizing=_sizing,
    placeholder=lambda source: source.tokens["boi_token"],
    mask=Mask.IMAGE,
    refusal=_refusal,
)
