"""Builds a tiny Janus folder: 16 rows per image between two markers, Llama text, and the smallest model for drawing."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

from tests import tiny_models
from tests.tiny_families import deepseek_vl, parts

NAME = "janus"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    named = {
        "image_token": deepseek_vl.IMAGE,
        "boi_token": "<begin_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = parts.named_tokenizer(
        [deepseek_vl.BOS, deepseek_vl.EOS, deepseek_vl.PAD, "<|User|>", "<|Assistant|>", *named.values()],
        named,
        bos=deepseek_vl.BOS,
        eos=deepseek_vl.EOS,
        pad=deepseek_vl.PAD,
        template=deepseek_vl.template("<|User|>", "<|Assistant|>"),
        adds_bos=True,
    )
    config = transformers.JanusConfig(
        **deepseek_vl.outer_config(tokenizer),
        vision_config=_vision_config(),
        # Group norms split channels into 32 groups.
        vq_config={
            "num_embeddings": 16,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "projection_dim": tiny_models.HIDDEN_SIZE,
            "image_token_embed_dim": tiny_models.HIDDEN_SIZE,
        },
    )
    model = parts.random_model(
        transformers.JanusForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains=parts.ATTENTIVE | {"model.aligner.hidden_layers": 2.0},
    )
    side = deepseek_vl.SIDE
    images = JanusImageProcessorPil(size={"height": side, "width": side}, do_convert_rgb=True)
    settings = {"processor_class": "JanusProcessor", "num_image_tokens": deepseek_vl.ROWS_PER_IMAGE}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.JanusProcessor)


def _vision_config() -> dict[str, Any]:
    return {
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "num_hidden_layers": tiny_models.NUM_LAYERS,
        "num_attention_heads": 4,
        "image_size": deepseek_vl.SIDE,
        "patch_size": deepseek_vl.PATCH,
        "mlp_ratio": 2.0,
        "projection_dim": tiny_models.HIDDEN_SIZE,
        "num_image_tokens": deepseek_vl.ROWS_PER_IMAGE,
    }
