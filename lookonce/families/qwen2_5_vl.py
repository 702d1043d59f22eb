"""Qwen2.5-VL (arXiv:2502.13923): Qwen2-VL's layout over another tower."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen2_vl

FAMILY = replace(
    qwen2_vl.FAMILY,
    title="Qwen2.5-VL",
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
)
