"""PaliGemma 1 and 2 (arXiv:2407.07726, 2412.03555): the whole prompt sees itself, positions start at 1."""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing, Mask

_PLACEHOLDER = "<image>"


def _sizing(source: FamilySource) -> ImageSizing:
    return sizing.constant(ImageShape((sizing.square_patches(source.config.vision_config) ** 2,)))


def _finish_text(text: str, bos_token: str) -> str:
    """Inserts BOS after the last image and ends the prompt with a line break."""
    images, found, rest = text.rpartition(_PLACEHOLDER)
    return f"{images}{found}{bos_token}{rest}\n"


FAMILY = Family(
    title="PaliGemma",
    model_type="paligemma",
    architecture="PaliGemmaForConditionalGeneration",
    sizing=_sizing,
    mask=Mask.PROMPT,
    first_position=1,
    finish_text=_finish_text,
)
