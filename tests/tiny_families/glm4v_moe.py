"""A tiny GLM-4.5V: a dense text layer, then mixtures of four experts in two groups, with a shared expert.

Two experts are chosen for each token, both from the better group, by scores with a bias that the weights do not have.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from tests import tiny_models
from tests.tiny_families import glm4v, parts

NAME = "glm4v_moe"

load_processor = glm4v.load_processor


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds the model; everything but the text layers is GLM-4.1V's."""
    tokenizer = glm4v.new_tokenizer()
    config = transformers.Glm4vMoeConfig(
        text_config=glm4v.text_config(tokenizer) | _experts() | {"model_type": "glm4v_moe_text"},
        vision_config=glm4v.vision_config(),
        **glm4v.token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Glm4vMoeForConditionalGeneration, config, tokenizer, seed, ends=glm4v.ENDS, gains=glm4v.GAINS
    )
    _draw_biases(model, seed)
    processor = glm4v.processor(transformers.Glm4vProcessor, Glm4vImageProcessorPil, tokenizer)
    return parts.save(folder, model, processor)


def _experts() -> dict[str, Any]:
    return {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "moe_intermediate_size": tiny_models.HIDDEN_SIZE,
    }


def _draw_biases(model: Any, seed: int) -> None:
    """Draws the biases of the experts' scores, which are buffers and would stay zero."""
    generator = torch.Generator().manual_seed(seed + 2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
