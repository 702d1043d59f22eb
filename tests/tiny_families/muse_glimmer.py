"""A tiny Muse Glimmer: one row per 28 px square, a tower with windows, text layers with a window."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers

from tests import tiny_models
from tests.tiny_families import parts

NAME = "muse_glimmer"
PATCH, MERGE = 14, 2
MAX_ROWS = 24
_TOKENS = {"image_token_id": "<|patch|>", "video_token_id": "<|video|>"}
_SPECIAL = (
    *("<|pad|>", "<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>"),
    *("<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_end|>", "<|vid_frame_separator|>"),
)
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|patch|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 1 to 24 rows, and more for very elongated images.

    Three of the four text layers see 12 tokens, the last one all without positions. Two of the three tower layers have
    windows of 2 × 2 rows.
    """
    tokenizer = new_tokenizer(_TOKENS.values())
    config = transformers.MuseGlimmerConfig(
        text_config=text_config(tokenizer) | {"model_type": "muse_glimmer_text"},
        vision_config=vision_config(),
        **common_config(tokenizer, _TOKENS),
    )
    model = parts.random_model(transformers.MuseGlimmerForConditionalGeneration, config, tokenizer, seed)
    with torch.no_grad():
        for name, parameter in model.model.language_model.named_parameters():
            # These multiply by 1 + weight.
            if name.endswith("layernorm.weight"):
                parameter.sub_(1.0)
    return parts.save(folder, model, parts.whole_processor(_processor_class(), image_processor(), tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, with torchvision."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.MuseGlimmerProcessor)


def new_tokenizer(more: Iterable[str]) -> Any:
    """Trains a tokenizer with Muse's special tokens, and more of them."""
    return parts.named_tokenizer(
        [*_SPECIAL, *more], {}, bos="<|begin_of_text|>", eos="<|eot|>", pad="<|pad|>", template=_TEMPLATE
    )


def text_config(tokenizer: Any) -> dict[str, Any]:
    """Returns fields that the text models of all Muses share: four layers with a window of 12 tokens, or without."""
    return tiny_models._text_config(tokenizer) | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }


def vision_config() -> dict[str, Any]:
    """Returns a tower in which two of the three layers have windows of 2 × 2 rows."""
    return {
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
        "num_hidden_layers": tiny_models.NUM_LAYERS,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
        "layer_types": ["window_attention", "full_attention", "window_attention"],
    }


def common_config(tokenizer: Any, tokens: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields beside the parts of a model; `tokens` has the text of each token that a field names."""
    return {
        "out_hidden_size": tiny_models.HIDDEN_SIZE * MERGE**2,
        "projector_hidden_size": tiny_models.HIDDEN_SIZE,
        "tie_word_embeddings": False,
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in tokens.items()},
    }


def image_processor() -> Any:
    """Returns an image processor of at most 24 rows."""
    from transformers.models.muse_glimmer.image_processing_muse_glimmer import MuseGlimmerImageProcessor

    return MuseGlimmerImageProcessor(patch_size=PATCH, merge_size=MERGE, max_image_tokens=MAX_ROWS)
