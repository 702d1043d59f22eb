"""The registry of families by model type. A new family is one more module in the list."""

from __future__ import annotations

from collections.abc import Mapping

from lookonce.families import (
    aya_vision,
    ernie4_5_vl_moe,
    exaone4_5,
    gemma3,
    glm4v,
    hyperclovax_vision_v2,
    idefics3,
    internvl,
    llava,
    llava_next,
    llava_onevision,
    mistral3,
    paddleocr_vl,
    paligemma,
    qwen2_5_omni_thinker,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
    smolvlm,
    video_llama_3,
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
    video_llama_3,
    exaone4_5,
    hyperclovax_vision_v2,
    qwen2_5_omni_thinker,
    ernie4_5_vl_moe,
)

FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""Families by Hugging Face model type, in the order of the documentation."""
