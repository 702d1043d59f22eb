"""Nemotron-H Omni (`nemotron_h_omni`): images of any size, one row per square of four patches, between two markers.

Most layers of the language model are Mamba2, MLPs or experts, and its attention has no positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.sizing import MAX_ASPECT

# Patches of a row's side. The model itself has it in two forms, of which one is fixed.
_MERGE = 2
_NO_LIMIT = (0.0, math.inf)
_TEXT_SIZES = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size")
_PROCESSOR_SIZES = ("patch_size", "min_num_patches", "max_num_patches", "max_model_len")


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import get_patch_grid_size

    processor = source.processor
    begin = source.tokens.get("image_start_token", "<img>")
    end = source.tokens.get("image_end_token", "</img>")
    least, most = processor.min_num_patches, max(processor.max_num_patches, processor.min_num_patches)
    # A smaller image is enlarged with both sides rounded up: to fewer than (1 + least) · (1 + 1) patches.
    most_rows = max(most, 2 * least + 1 if most > least else 0) // _MERGE**2
    # The most elongated images get two lines of patches for one, which may exceed a small bound.
    most_rows = max(most_rows, min(most, _MERGE * (MAX_ASPECT + 2)) // _MERGE)

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        try:
            lines, columns = get_patch_grid_size(height, width, processor.patch_size, _MERGE, least, most)
        except ZeroDivisionError:
            lines = columns = 0
        num_rows = lines * columns // _MERGE**2
        if not 0 < num_rows <= most_rows:
            raise ValueError("the image is so elongated that its shorter side gets no patch")
        return ImageShape((begin, num_rows, end))

    return ImageSizing(shape, ImageShape((begin, most_rows, end)))


def _refusal(source: FamilySource) -> str | None:
    text, vision = source.config.text_config, source.config.vision_config
    if (text.model_type, vision.model_type) != ("nemotron_h", "radio"):
        return f"its parts are {text.model_type} and {vision.model_type}, but only nemotron_h and radio are served"
    return _text_refusal(text) or _processor_refusal(source)


def _text_refusal(text: Any) -> str | None:
    if (reason := _size_refusal(text, _TEXT_SIZES, "its text model")) is not None:
        return reason
    if text.mamba_num_heads % text.n_groups:
        return f"mamba_num_heads, {text.mamba_num_heads}, is no multiple of n_groups, {text.n_groups}"
    limits = text.time_step_limit
    if not isinstance(limits, list | tuple) or tuple(limits) != _NO_LIMIT:
        return f"time steps are served without limits, but time_step_limit of its text model is {limits!r}"
    return None


def _processor_refusal(source: FamilySource) -> str | None:
    config, processor = source.config, source.processor
    if (reason := _size_refusal(processor, _PROCESSOR_SIZES, "its image processor")) is not None:
        return reason
    if (processor.max_model_len - 4) * _MERGE**2 < processor.max_num_patches:
        return (
            f"its image processor has a max_model_len of {processor.max_model_len} and a max_num_patches of "
            f"{processor.max_num_patches}, with which the rows of an image depend on how many images a prompt has"
        )
    ratios = processor.downsample_ratio, config.downsample_ratio
    if ratios != (1 / _MERGE, 1 / _MERGE):
        return f"downsample_ratio of its image processor and of the model must be {1 / _MERGE}, not {ratios}"
    if processor.patch_size != config.vision_config.patch_size:
        return (
            f"its image processor has patches of {processor.patch_size} pixels, but its vision tower of "
            f"{config.vision_config.patch_size}"
        )
    return None


def _size_refusal(owner: Any, names: Sequence[str], described: str) -> str | None:
    """Returns the reason if one of these settings is not a whole number of at least 1."""
    values = {name: getattr(owner, name) for name in names}
    wrong = [name for name, value in values.items() if not isinstance(value, int) or value < 1]
    return f"{wrong[0]} of {described} must be a whole number ≥ 1, not {values[wrong[0]]!r}" if wrong else None


FAMILY = Family(
    title="Nemotron-H Omni",
    model_type="nemotron_h_omni",
    architecture="NemotronH_Omni_Reasoning_V3",
    sizing=_sizing,
    inputs=("pixel_values", "image_grid_hw"),
    # With layers that predict several tokens in the language model, the tower has one more norm.
    text_settings=lambda config: {"has_tower_norm": config.text_config.num_nextn_predict_layers > 0},
    needs_torchvision=True,
    refusal=_refusal,
)
