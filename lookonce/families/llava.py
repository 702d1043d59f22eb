"""LLaVA 1.5 (arXiv:2310.03744): one square of a fixed size; with Pixtral's tower any size and one row per patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.pixtral_rows import broken_rows, row_arguments

_TOWERS = ("clip_vision_model", "siglip_vision_model", "pixtral")


def _sizing(source: FamilySource) -> ImageSizing:
    config = source.config
    vision = config.vision_config
    if vision.model_type == "pixtral":
        return broken_rows(source)
    dropped = config.vision_feature_select_strategy == "default"
    return sizing.constant(ImageShape((sizing.square_patches(vision) ** 2 + sizing.has_class_row(vision) - dropped,)))


def _arguments(source: FamilySource, options: ProcessorOptions) -> Mapping[str, Any]:
    return row_arguments(source, options) if source.config.vision_config.model_type == "pixtral" else {}


def _refusal(source: FamilySource) -> str | None:
    tower = source.config.vision_config.model_type
    return None if tower in _TOWERS else f"LLaVA with the vision tower {tower!r} is not supported"


FAMILY = Family(
    title="LLaVA 1.5",
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    sizing=_sizing,
    # Pixtral's tower needs the sizes; the processors of CLIP and SigLIP give none.
    inputs=("pixel_values", "image_sizes"),
    processor_arguments=_arguments,
    refusal=_refusal,
)
