"""A tiny Cosmos 3 Edge: one row per 32 px square, learned tower positions, an MLP without a gate, interleaved axes."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.cosmos3_edge.image_processing_pil_cosmos3_edge import Cosmos3EdgeImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "cosmos3_edge"

_SQUARE = 32 * 32


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image; the tower's positions are on a 4 × 4 grid."""
    tokenizer = parts.qwen_tokenizer(tiny_models.QWEN_TEMPLATE)
    config = transformers.Cosmos3EdgeConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "cosmos3_edge_text",
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]},
        },
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "num_patches": 16,
            "patch_size": 16,
        },
        projector_hidden_size=2 * tiny_models.HIDDEN_SIZE,
        **parts.qwen_token_ids(tokenizer),
    )
    images = Cosmos3EdgeImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    model = parts.random_model(
        transformers.Cosmos3EdgeForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE,
    )
    return parts.save(folder, model, parts.whole_processor(_processor_class(), images, tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    """Returns a processor class that gives the types of tokens, without which `generate` refuses images."""
    original = parts.without_video(transformers.Cosmos3EdgeProcessor)
    return type(original.__name__, (original,), {"return_mm_token_type_ids": True})
