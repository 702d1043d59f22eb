"""Qianfan-OCR (arXiv:2603.13398): InternVL's tiles and markers; prompts show an image as plain text, not as a token."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import internvl
from lookonce.families.base import FamilySource


def _placeholder(source: FamilySource) -> str:
    return str(source.settings.get("image_placeholder_token", "<image>"))


FAMILY = replace(
    internvl.FAMILY,
    video=None,
    title="Qianfan-OCR",
    model_type="qianfan_ocr",
    architecture="QianfanOCRForConditionalGeneration",
    placeholder=_placeholder,
)
