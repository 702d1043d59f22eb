"""Gemma 4 without a vision tower: a row is one square of pixels, projected by itself. The rest is as in larger Gemma 4.

In layers with a window, the rows of an image see each other within it; in the other layers they are causal. In
transformers 5.23, `generate` computes so with a static cache alone (`create_masks_for_generate` of the model). With its
default cache, `forward` of the model lets the rows see each other in all layers, and beyond the window
(modeling_gemma4_unified.py, line 1184). This mistake was corrected in Gemma 3 and 4 (transformers PR 46850), because
the models were not trained so, and was left in Gemma 4 Unified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lookonce.families import gemma4
from lookonce.families.base import FamilySource, FrameSizing


def _positions_refusal(source: FamilySource, most_rows: int) -> str | None:
    # The longest image has a single line.
    most = source.config.vision_config.mm_posemb_size
    return f"max_soft_tokens is {most_rows}, but the model has {most} positions" if most_rows > most else None


def _refusal(source: FamilySource) -> str | None:
    refusal = gemma4.FAMILY.refusal(source)
    if refusal is not None:
        return refusal
    vision, processor = source.config.vision_config, source.processor
    sizes = processor.patch_size, processor.pooling_kernel_size
    if sizes != (vision.patch_size, vision.pooling_kernel_size):
        return (
            f"patch_size and pooling_kernel_size of its image processor are {sizes}, but those of the model are "
            f"{(vision.patch_size, vision.pooling_kernel_size)}"
        )
    if source.config.text_config.num_kv_shared_layers:
        return "a Gemma 4 without per-layer inputs whose layers share keys (num_kv_shared_layers) is not supported"
    return _positions_refusal(source, processor.max_soft_tokens)


def _frame_sizing(source: FamilySource, settings: Mapping[str, Any]) -> FrameSizing:
    refusal = _positions_refusal(source, settings["max_soft_tokens"])
    if refusal is not None:
        raise ValueError(refusal)
    return gemma4.VIDEO.sizing(source, settings)


FAMILY = replace(
    gemma4.FAMILY,
    title="Gemma 4 Unified",
    model_type="gemma4_unified",
    architecture="Gemma4UnifiedForConditionalGeneration",
    needs_torchvision=True,
    video=replace(gemma4.VIDEO, sizing=_frame_sizing),
    refusal=_refusal,
)
