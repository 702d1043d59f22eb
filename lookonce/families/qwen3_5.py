"""Qwen3.5: Qwen3-VL's layout without levels; three of four text layers are gated delta nets instead of attention."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen2_vl, qwen3_vl

FAMILY = replace(
    qwen2_vl.FAMILY,
    title="Qwen3.5",
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    video=qwen3_vl.VIDEO,
)
