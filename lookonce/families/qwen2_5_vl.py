"""Qwen2.5-VL (arXiv:2502.13923): Qwen2-VL's layout with another tower; frames are positioned by their real time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookonce.families import qwen2_vl


def _real_time(config: Any, seconds: float) -> float:
    """Returns the time steps of an interval: a step is a fixed fraction of a second (section 2.1.2)."""
    return float(config.vision_config.tokens_per_second * seconds)


FAMILY = replace(
    qwen2_vl.FAMILY,
    title="Qwen2.5-VL",
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    video=replace(qwen2_vl.VIDEO, time_steps=_real_time),
)
