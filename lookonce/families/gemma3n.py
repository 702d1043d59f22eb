"""Gemma 3n: one square, of which a MobileNet makes a fixed number of rows, between markers. Most layers have a window.

Late layers read the keys and values of earlier ones, and each layer adds an embedding of the token. The markers behind
images and sound, and their placeholders, are not in the language model's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing
from lookonce.families.timm_tower import tower_refusal

_TOWER = "mobilenetv5_300m_enc"
_TOWER_TYPE = "gemma3n_vision"
# The tower's arguments: a factor on its channels, and the rows along one side, with timm's value.
_CHANNELS, _SIDE = "channel_multiplier", "msfa_output_resolution"
_DEFAULT_SIDE = 16
# The default of the whole processor in transformers.
_DEFAULT_NUM_ROWS = 256


def _sizing(source: FamilySource) -> ImageSizing:
    begin, end = source.tokens["boi_token"], source.tokens["eoi_token"]
    return sizing.constant(ImageShape((f"\n\n{begin}", source.config.vision_soft_tokens_per_image, f"{end}\n\n")))


def _embedders(config: Any) -> Mapping[str, range]:
    vision, audio = config.vision_config, config.audio_config
    return {
        "embed_vision": range(vision.vocab_offset, audio.vocab_offset),
        "embed_audio": range(audio.vocab_offset, audio.vocab_offset + audio.vocab_size),
    }


def _refusal(source: FamilySource) -> str | None:
    refusal = (
        tower_refusal(source.config, {_TOWER}, (_CHANNELS, _SIDE), _TOWER_TYPE)
        or _rows_refusal(source)
        or _ids_refusal(source.config)
        or _layers_refusal(source.config.text_config)
    )
    if refusal is not None:
        return refusal
    return None if source.processor.do_resize else "an image processor that does not resize is not supported"


def _rows_refusal(source: FamilySource) -> str | None:
    config = source.config
    arguments = config.vision_config.model_args or {}
    if not arguments.get(_CHANNELS, 1) <= 1:
        return f"{_CHANNELS} of its vision tower is {arguments[_CHANNELS]}, but must be at most 1"
    side, num_rows = arguments.get(_SIDE, _DEFAULT_SIDE), config.vision_soft_tokens_per_image
    if side * side != num_rows:
        return f"vision_soft_tokens_per_image is {num_rows}, but its vision tower makes {side} × {side} rows"
    num_placeholders = source.settings.get("image_seq_length", _DEFAULT_NUM_ROWS)
    if num_placeholders != num_rows:
        return f"image_seq_length in processor_config.json is {num_placeholders}, but an image has {num_rows} rows"
    return None


def _ids_refusal(config: Any) -> str | None:
    vision, audio = config.vision_config, config.audio_config
    if not vision.vocab_offset < audio.vocab_offset == vision.vocab_offset + vision.vocab_size:
        return "its config.json has ids of tokens between those of images and those of sound (vocab_offset)"
    if audio.vocab_offset + audio.vocab_size < config.text_config.vocab_size:
        return "its config.json has ids of tokens behind those of sound (vocab_offset)"
    return None


def _layers_refusal(text: Any) -> str | None:
    """Returns why the numbers by which layers mix and thin out hidden states are refused, None if they are not."""
    if not 0 <= text.altup_active_idx < text.altup_num_inputs:
        return (
            f"altup_active_idx in config.json is {text.altup_active_idx}, but must be one of the altup_num_inputs = "
            f"{text.altup_num_inputs} inputs, counted from 0"
        )
    wrong = [share for share in text.activation_sparsity_pattern if not 0 <= share < 1]
    # With a share of 1 the threshold would be infinite.
    return (
        f"activation_sparsity_pattern in config.json has {wrong[0]}, but must have shares from 0 to 1"
        if wrong
        else None
    )


FAMILY = Family(
    title="Gemma 3n",
    model_type="gemma3n",
    architecture="Gemma3nForConditionalGeneration",
    sizing=_sizing,
    # Layers look up all tokens as they are.
    padded_input_ids=lambda _config: (),
    embedders=_embedders,
    needs_timm=True,
    refusal=_refusal,
)
