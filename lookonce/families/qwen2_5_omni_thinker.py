"""The thinker of Qwen2.5-Omni (arXiv:2503.20215), which reads and writes text: Qwen2.5-VL's layout.

Images, videos without their sound, and text. The folder also has an encoder of audio, which is not loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookonce.families import qwen2_vl


def _real_time(config: Any, seconds: float) -> float:
    """Returns the time steps of an interval, of which there are 25 per second (section 2.2)."""
    return float(config.position_id_per_seconds * seconds)


FAMILY = replace(
    qwen2_vl.FAMILY,
    title="Qwen2.5-Omni",
    model_type="qwen2_5_omni_thinker",
    architecture="Qwen2_5OmniThinkerForConditionalGeneration",
    # The whole processor gives these bounds to its video processor.
    video=replace(
        qwen2_vl.VIDEO,
        time_steps=_real_time,
        overrides={"size": qwen2_vl.VIDEO.defaults["size"], "min_pixels": None, "max_pixels": None},
    ),
)
