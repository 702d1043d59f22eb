"""A tiny Cosmos 3: Qwen3-VL's model under another model type."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests import tiny_models
from tests.tiny_families import parts, qwen3_vl

NAME = "cosmos3_omni"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows of three feature levels each."""
    tokenizer = parts.qwen_tokenizer(tiny_models.QWEN_TEMPLATE)
    config = transformers.Cosmos3OmniConfig(
        text_config=qwen3_vl.text_config(tokenizer) | {"model_type": "qwen3_vl_text"},
        vision_config=qwen3_vl.vision_config() | {"model_type": "qwen3_vl_vision"},
        **parts.qwen_token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Cosmos3OmniForConditionalGeneration,
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
