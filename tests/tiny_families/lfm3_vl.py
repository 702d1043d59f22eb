"""A tiny LFM3-VL: convolutions and attention in the tower, and convolutions, windows and attention in the text half."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "lfm3_vl"

_SQUARE = 32 * 32
# Published ones have a window of 256 tokens.
_WINDOW = 12


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image."""
    tokenizer = parts.qwen_tokenizer(tiny_models.QWEN_TEMPLATE)
    config = transformers.Lfm3VlConfig(
        text_config=_text_config(tokenizer),
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        projector_hidden_size=2 * tiny_models.HIDDEN_SIZE,
        tie_word_embeddings=False,
        **parts.qwen_token_ids(tokenizer),
    )
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE},
        patch_size=16,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    model = parts.random_model(
        transformers.Lfm3VlForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE_NORMED,
    )
    return parts.save(folder, model, parts.whole_processor(_processor_class(), images, tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _processor_class())


def _text_config(tokenizer: Any) -> Any:
    """Returns five layers: two convolutions with seven taps, two with a window and one with full attention."""
    return transformers.Lfm3Config(
        **tiny_models._text_config(tokenizer)
        | {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
            "head_dim": 16,
            "sliding_window": _WINDOW,
        }
    )


def _processor_class() -> Any:
    return parts.without_video(transformers.Lfm3VlProcessor)
