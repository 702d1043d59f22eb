"""EXAONE 4.5 (arXiv:2604.08644): Qwen2.5-VL's tower with grouped heads, and text with positions in sequence.

Most text layers have a window; the others have no rotary positions. The pairs of a video follow each other without
text in between.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import qwen2_vl
from lookonce.families.base import PairRule, PositionAxes

FAMILY = replace(
    qwen2_vl.FAMILY,
    title="EXAONE 4.5",
    model_type="exaone4_5",
    architecture="Exaone4_5_ForConditionalGeneration",
    axes=PositionAxes.SEQUENCE,
    video=PairRule(
        defaults=qwen2_vl.VIDEO.defaults,
        frame_size=qwen2_vl.VIDEO.frame_size,
        bounded_frames=qwen2_vl.VIDEO.bounded_frames,
    ),
)
