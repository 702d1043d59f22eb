"""Mistral Small 3.1 and later (`mistral3`): Pixtral's tower with merged patches, a break token after each line."""

from __future__ import annotations

from lookonce.families.base import Family, FamilySource
from lookonce.families.pixtral_rows import broken_rows, row_arguments


def _refusal(source: FamilySource) -> str | None:
    tower = source.config.vision_config.model_type
    return None if tower == "pixtral" else f"Mistral 3 with the vision tower {tower!r} is not supported"


FAMILY = Family(
    title="Mistral 3",
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    sizing=broken_rows,
    inputs=("pixel_values", "image_sizes"),
    processor_arguments=row_arguments,
    # The norm before the patch merger uses the language model's epsilon.
    text_settings=lambda config: {"rms_norm_eps": config.text_config.rms_norm_eps},
    # In transformers 5.23 a pass with a single row loses an axis and fails, so encode two copies.
    num_copies=lambda shape, _options: 2 if shape.num_rows == 1 else 1,
    refusal=_refusal,
)
