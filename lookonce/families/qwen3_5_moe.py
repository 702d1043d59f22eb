"""Qwen3.5 MoE: Qwen3.5 with a mixture of experts in the language model and the same vision half."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen3_5

FAMILY = replace(
    qwen3_5.FAMILY,
    title="Qwen3.5 MoE",
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
)
