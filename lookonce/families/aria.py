"""Aria (arXiv:2410.05993): learned queries read a padded square, whatever the size of the image; mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing

# Side of the square in pixels. The model's processor asks for it, whatever the folder of the image processor says.
_SIDE = 980


def _sizing(source: FamilySource) -> ImageSizing:
    config = source.config
    num_patches = (_SIDE // config.vision_config.patch_size) ** 2
    return sizing.constant(ImageShape((config.projector_patch_to_query_dict[num_patches],)))


def _arguments(_source: FamilySource, _options: ProcessorOptions) -> Mapping[str, Any]:
    return {"max_image_size": _SIDE, "split_image": False}


FAMILY = Family(
    title="Aria",
    model_type="aria",
    architecture="AriaForConditionalGeneration",
    sizing=_sizing,
    # The mask tells patches of the image from those of its padding.
    inputs=("pixel_values", "pixel_mask"),
    processor_arguments=_arguments,
)
