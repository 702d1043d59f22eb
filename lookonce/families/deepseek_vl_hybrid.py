"""DeepSeek-VL with two towers (arXiv:2403.05525): half of each row comes from a larger copy of the image."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import deepseek_vl

FAMILY = replace(
    deepseek_vl.FAMILY,
    title="DeepSeek-VL hybrid",
    model_type="deepseek_vl_hybrid",
    architecture="DeepseekVLHybridForConditionalGeneration",
    inputs=("pixel_values", "high_res_pixel_values"),
)
