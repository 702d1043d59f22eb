"""PaddleOCR-VL (arXiv:2510.14528): Qwen2-VL's layout; images thinner than a row are enlarged first."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen2_vl, sizing
from lookonce.families.base import FamilySource, ImageSizing


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize

    return sizing.patch_grid(source.processor, smart_resize)


FAMILY = replace(
    qwen2_vl.FAMILY,
    title="PaddleOCR-VL",
    model_type="paddleocr_vl",
    architecture="PaddleOCRVLForConditionalGeneration",
    sizing=_sizing,
    video=None,
)
