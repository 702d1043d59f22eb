"""The reasoner of Cosmos 3 (`cosmos3_omni`), which reads and writes text: Qwen3-VL's layout and model.

Weights of the generator of images and videos, which published folders also have, are not loaded.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen3_vl

FAMILY = replace(
    qwen3_vl.FAMILY,
    title="Cosmos 3",
    model_type="cosmos3_omni",
    architecture="Cosmos3OmniForConditionalGeneration",
)
