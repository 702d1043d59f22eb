"""Qwen2.5-VL (arXiv:2502.13923): Qwen2-VL's layout over another tower; videos are placed by their real time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookonce.families import qwen2_vl


def _real_time(config: Any, seconds: float) -> float:
    """Section 2.1.2: steps of the time axis are a fixed part of a second."""
    return float(config.vision_config.tokens_per_second * seconds)


FAMILY = replace(
    qwen2_vl.FAMILY,
    title="Qwen2.5-VL",
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    video=replace(qwen2_vl.VIDEO, tick=_real_time),
)
