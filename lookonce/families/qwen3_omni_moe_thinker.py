"""The thinker of Qwen3-Omni (arXiv:2509.17765), which reads and writes text: Qwen3-VL MoE's layout.

Images and text. The folder also has an encoder of audio, which is not loaded. Videos are refused: with most frame
rates, the positions of their frames are not whole numbers.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen3_vl

FAMILY = replace(
    qwen3_vl.FAMILY,
    title="Qwen3-Omni",
    model_type="qwen3_omni_moe_thinker",
    architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
    video=None,
)
