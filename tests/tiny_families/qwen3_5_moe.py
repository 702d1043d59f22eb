"""A tiny Qwen3.5 MoE: mixtures of four experts, two of them and a shared one for each token."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests import tiny_models
from tests.tiny_families import parts, qwen3_5, qwen3_vl

NAME = "qwen3_5_moe"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds the model; everything but the experts is Qwen3.5's."""
    tokenizer = parts.qwen_tokenizer(tiny_models.QWEN_TEMPLATE)
    config = transformers.Qwen3_5MoeConfig(
        text_config=qwen3_5.text_config(tokenizer)
        | {
            "model_type": "qwen3_5_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": tiny_models.HIDDEN_SIZE,
            "shared_expert_intermediate_size": tiny_models.HIDDEN_SIZE,
        },
        vision_config=qwen3_5.vision_config() | {"model_type": "qwen3_5_moe_vision"},
        **parts.qwen_token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Qwen3_5MoeForConditionalGeneration,
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
