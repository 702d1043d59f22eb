"""Muse Spark (`muse_spark`): Muse Glimmer's images, and a language model with experts.

The outputs of experts are normed before they are added, so experts stay transformers' modules.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lookonce.families import muse_glimmer
from lookonce.families.base import FamilySource

# Each divides something in every layer, or in the head.
_DIVISORS = ("residual_gate_temperature", "final_logit_softcapping")


def _refusal(source: FamilySource) -> str | None:
    return muse_glimmer.FAMILY.refusal(source) or _text_refusal(source.config.text_config)


def _text_refusal(text: Any) -> str | None:
    for name in _DIVISORS:
        value = getattr(text, name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            return f"{name} of its text model must be a number > 0, not {value!r}"
    if (found := len(text.layer_rope_theta)) != text.num_hidden_layers:
        return f"layer_rope_theta of its text model has {found} entries for {text.num_hidden_layers} layers"
    if not 1 <= text.num_experts_per_tok <= text.num_local_experts:
        return (
            f"num_experts_per_tok of its text model must be between 1 and num_local_experts "
            f"({text.num_local_experts}), not {text.num_experts_per_tok}"
        )
    return None


FAMILY = replace(
    muse_glimmer.FAMILY,
    title="Muse Spark",
    model_type="muse_spark",
    architecture="MuseSparkForConditionalGeneration",
    refusal=_refusal,
)
