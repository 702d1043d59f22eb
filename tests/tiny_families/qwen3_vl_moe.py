"""A tiny Qwen3-VL whose text layers are mixtures of four experts, two of them for each token."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests import tiny_models
from tests.tiny_families import parts, qwen3_vl

NAME = "qwen3_vl_moe"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds the model; everything but the experts is Qwen3-VL's."""
    tokenizer = parts.qwen_tokenizer(tiny_models.QWEN_TEMPLATE)
    config = transformers.Qwen3VLMoeConfig(
        text_config=qwen3_vl.text_config(tokenizer)
        | {
            "model_type": "qwen3_vl_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": tiny_models.HIDDEN_SIZE,
        },
        vision_config=qwen3_vl.vision_config(),
        **parts.qwen_token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Qwen3VLMoeForConditionalGeneration,
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
