"""The registry of families by model type. A new family is one more module in the list."""

from __future__ import annotations

from collections.abc import Mapping

from lookonce.families import (
    aya_vision,
    deepseek_ocr2,
    gemma3,
    glm4v,
    got_ocr2,
    granite_docling,
    idefics3,
    internvl,
    lighton_ocr,
    llava,
    llava_next,
    llava_onevision,
    mistral3,
    paddleocr_vl,
    paligemma,
    qianfan_ocr,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
    smolvlm,
)
from lookonce.families.base import Family

_MODULES = (
    llava,
    llava_next,
    llava_onevision,
    qwen2_vl,
    qwen2_5_vl,
    qwen3_vl,
    qwen3_vl_moe,
    smolvlm,
    idefics3,
    internvl,
    gemma3,
    paligemma,
    mistral3,
    glm4v,
    aya_vision,
    paddleocr_vl,
    lighton_ocr,
    got_ocr2,
    deepseek_ocr2,
    qianfan_ocr,
    granite_docling,
)

FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""Families by Hugging Face model type, in the order of the documentation."""
