"""The registry of families by model type. A new family is one more module in the list."""

from __future__ import annotations

from collections.abc import Mapping

from lookonce.families import (
    aria,
    aya_vision,
    deepseek_ocr2,
    deepseek_vl,
    deepseek_vl_hybrid,
    gemma3,
    glm4v,
    glm4v_moe,
    glm46v,
    glm_ocr,
    got_ocr2,
    granite_docling,
    hunyuan_vl,
    idefics2,
    idefics3,
    internvl,
    janus,
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
    glm46v,
    glm4v_moe,
    glm_ocr,
    aya_vision,
    paddleocr_vl,
    hunyuan_vl,
    deepseek_vl,
    deepseek_vl_hybrid,
    aria,
    janus,
    idefics2,
    lighton_ocr,
    got_ocr2,
    deepseek_ocr2,
    qianfan_ocr,
    granite_docling,
)

FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""Families by Hugging Face model type, in the order of the documentation."""
