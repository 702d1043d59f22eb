"""North Vision (`cohere_compass`): Qwen3-VL's layout and levels, with Command R7B's text layers (arXiv:2504.00698).

Its processor leaves the marks around a video's placeholder in place, and writes others around each pair of frames.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen3_vl


def _time_in_words(seconds: float) -> tuple[str, str]:
    return f"<{seconds:.1f} seconds><|VISION_START|>", "<|VISION_END|>"


FAMILY = replace(
    qwen3_vl.FAMILY,
    title="North Vision",
    model_type="cohere_compass",
    architecture="CohereCompassForConditionalGeneration",
    video=replace(qwen3_vl.VIDEO, placeholder=lambda token: token, surrounding_text=_time_in_words),
)
