"""Qwen3-VL MoE: Qwen3-VL with a mixture of experts in the language model and the same vision half."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen3_vl

FAMILY = replace(
    qwen3_vl.FAMILY,
    title="Qwen3-VL MoE",
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
)
