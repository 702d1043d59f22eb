"""A tiny Qwen3.5: two of three text layers are gated delta nets, with more heads for values than for keys."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests import tiny_models
from tests.tiny_families import parts, qwen3_vl

NAME = "qwen3_5"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image."""
    tokenizer = parts.qwen_tokenizer(tiny_models.QWEN_TEMPLATE)
    config = transformers.Qwen3_5Config(
        text_config=text_config(tokenizer) | {"model_type": "qwen3_5_text"},
        vision_config=vision_config() | {"model_type": "qwen3_5_vision"},
        **parts.qwen_token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Qwen3_5ForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE_NORMED,
    )
    return parts.save(folder, model, qwen3_vl.processor(tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return qwen3_vl.load_processor(folder)


def text_config(tokenizer: Any) -> dict[str, Any]:
    """Returns three layers; of attention heads, half of the elements rotate."""
    return qwen3_vl.text_config(tokenizer) | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }


def vision_config() -> dict[str, Any]:
    """Returns Qwen3-VL's tower without levels."""
    config = qwen3_vl.vision_config()
    del config["deepstack_visual_indexes"]
    return config
