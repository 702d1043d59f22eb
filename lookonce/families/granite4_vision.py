"""Granite 4 Vision: LLaVA-NeXT's tiles, whose rows join the hidden states in front of several layers.

https://huggingface.co/ibm-granite. A Q-Former merges each window of patches to fewer rows, once per pair of a tower
layer and a layer of the language model, and once per corner of 2 × 2 patches. Nothing takes the place of the tokens'
embeddings, so a row is zeros followed by those feature levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from lookonce.families import llava_next, sizing
from lookonce.families.base import FamilySource, ImageSizing


def _sizing(source: FamilySource) -> ImageSizing:
    config = source.config
    side = sizing.square_patches(config.vision_config)
    return llava_next.tile_sizing(source, int(side * Fraction(config.downsample_rate)))


def _language_layers(config: Any) -> list[int]:
    """Returns the language model's layer that takes each level, in the model's order."""
    return [*(layer for _, layer in config.deepstack_layer_map), *config.spatial_target_layers]


def _levels(output: Any) -> Sequence[Any]:
    levels = [images for _, images in output.deepstack_features]
    return [[rows.new_zeros(rows.shape) for rows in levels[0]], *levels]


def _level_arguments(config: Any, has_row: Any, levels: Sequence[Any]) -> Mapping[str, Any]:
    by_layer = dict(zip(_language_layers(config), levels, strict=True))
    return {"vision_mask": has_row[None, :, None], "deepstack_features": by_layer}


def _feature_layers(config: Any) -> Sequence[int]:
    return [*(layer for layer, _ in config.deepstack_layer_map), config.spatial_vision_layer]


FAMILY = replace(
    llava_next.FAMILY,
    title="Granite 4 Vision",
    model_type="granite4_vision",
    architecture="Granite4VisionForConditionalGeneration",
    sizing=_sizing,
    num_levels=lambda config: len(_language_layers(config)),
    levels=_levels,
    level_arguments=_level_arguments,
    feature_layers=_feature_layers,
)
