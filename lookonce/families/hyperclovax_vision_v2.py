"""HyperCLOVA X 32B Think (arXiv:2601.03286): Qwen2.5-VL's tower, and text with positions in sequence.

The text model scales tokens and rows alike, and the wrapper scales the logits. Videos are not taken: the
processor writes a video's duration into the rendered text.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen2_vl
from lookonce.families.base import FamilySource, PositionAxes


def _refusal(source: FamilySource) -> str | None:
    tower = source.config.vision_config.model_type
    return None if tower == "qwen2_5_vl_vision" else f"HyperCLOVA X with the vision tower {tower!r} is not supported"


FAMILY = replace(
    qwen2_vl.FAMILY,
    title="HyperCLOVA X",
    model_type="hyperclovax_vision_v2",
    architecture="HyperCLOVAXVisionV2ForConditionalGeneration",
    axes=PositionAxes.SEQUENCE,
    video=None,
    refusal=_refusal,
)
