"""Builds a tiny DeepSeek-VL with two towers: SigLIP for 56 px, SAM with windows for 112 px, 16 rows per image."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)

from tests import tiny_models
from tests.tiny_families import deepseek_vl, parts

NAME = "deepseek_vl_hybrid"
LARGE_SIDE = 112


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = deepseek_vl.tokenizer()
    config = transformers.DeepseekVLHybridConfig(
        **deepseek_vl.outer_config(tokenizer),
        vision_config=parts.siglip_config(deepseek_vl.SIDE, deepseek_vl.PATCH),
        high_res_vision_config=transformers.SamVisionConfig(
            hidden_size=32,
            output_channels=16,
            num_hidden_layers=tiny_models.NUM_LAYERS,
            num_attention_heads=4,
            image_size=LARGE_SIDE,
            patch_size=14,
            mlp_ratio=2.0,
            window_size=3,
            global_attn_indexes=[1],
        ),
    )
    model = parts.random_model(
        transformers.DeepseekVLHybridForConditionalGeneration,
        config,
        tokenizer,
        seed,
        # The published weight of the middle layer's features is about 1.
        gains=parts.ATTENTIVE | {"high_res_vision_alpha": 10.0},
    )
    images = DeepseekVLHybridImageProcessorPil(
        size={"height": deepseek_vl.SIDE, "width": deepseek_vl.SIDE},
        high_res_size={"height": LARGE_SIDE, "width": LARGE_SIDE},
        do_convert_rgb=True,
    )
    settings = {"processor_class": "DeepseekVLHybridProcessor", "num_image_tokens": deepseek_vl.ROWS_PER_IMAGE}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.DeepseekVLHybridProcessor)
