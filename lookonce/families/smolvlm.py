"""SmolVLM (arXiv:2504.05299): Idefics3's layout with smaller models."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import idefics3

FAMILY = replace(
    idefics3.FAMILY,
    title="SmolVLM",
    model_type="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
)
