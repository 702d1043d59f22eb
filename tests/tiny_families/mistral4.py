"""A tiny Mistral Small 4: Mistral Small 3's tower, and a text half with latent attention and groups of experts."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests import tiny_models
from tests.tiny_families import mistral3, parts

NAME = "mistral4"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model whose first layer has no experts.

    Queries are made in one step, and grow after every 16 positions.
    """
    return mistral3.with_text(folder, text_config, parts.ATTENTIVE, seed)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return mistral3.load_processor(folder)


def text_config(tokenizer: Any) -> Any:
    """Returns four heads whose keys have 48 elements and values 24, and latents of 32 with a rotary key of 16."""
    return transformers.Mistral4Config(
        **tiny_models._text_config(tokenizer) | {"num_key_value_heads": 4},
        **LATENT,
        q_lora_rank=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    )


LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": tiny_models.HIDDEN_SIZE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
}
