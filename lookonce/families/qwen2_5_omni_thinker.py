"""The thinker of Qwen2.5-Omni (arXiv:2503.20215), which reads and writes text: Qwen2.5-VL's layout.

Images and text only. The folder also has an encoder of audio, which is not loaded.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen2_vl

FAMILY = replace(
    qwen2_vl.FAMILY,
    title="Qwen2.5-Omni",
    model_type="qwen2_5_omni_thinker",
    architecture="Qwen2_5OmniThinkerForConditionalGeneration",
    video=None,
)
