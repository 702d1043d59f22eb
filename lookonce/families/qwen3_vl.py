"""Qwen3-VL: Qwen2-VL's layout, and features of earlier tower layers that join the first layers' hidden states.

Those levels (deepstack, arXiv:2406.04334) are stored beside each row in the same entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookonce.families import qwen2_vl


def _num_levels(config: Any) -> int:
    return len(config.vision_config.deepstack_visual_indexes)


FAMILY = replace(
    qwen2_vl.FAMILY,
    title="Qwen3-VL",
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    num_levels=_num_levels,
)
