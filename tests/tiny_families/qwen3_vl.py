"""A tiny Qwen3-VL: one row per 32 px square, features of two tower layers added to the first text layers."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "qwen3_vl"

_SQUARE = 32 * 32


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows of three feature levels each."""
    tokenizer = parts.qwen_tokenizer(tiny_models.QWEN_TEMPLATE)
    config = transformers.Qwen3VLConfig(
        text_config=text_config(tokenizer) | {"model_type": "qwen3_vl_text"},
        vision_config=vision_config(),
        **parts.qwen_token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Qwen3VLForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE_NORMED,
    )
    return parts.save(folder, model, processor(tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _processor_class())


def text_config(tokenizer: Any) -> dict[str, Any]:
    """Returns four layers, heads wider than the hidden size divided by their number, interleaved rotary axes."""
    return tiny_models._text_config(tokenizer) | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }


def vision_config() -> dict[str, Any]:
    """Returns a tower with learned positions on an 8 × 8 grid, and features of the first and the third layer."""
    return {
        "depth": 4,
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
        "out_hidden_size": tiny_models.HIDDEN_SIZE,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 2],
    }


def processor(tokenizer: Any) -> Any:
    """Returns the whole processor of a new folder."""
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE},
        patch_size=16,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return parts.whole_processor(_processor_class(), images, tokenizer)


def _processor_class() -> Any:
    return parts.without_video(transformers.Qwen3VLProcessor)
