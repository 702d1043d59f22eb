"""Builds a tiny Idefics2 folder: four quarters and the whole image, 6 rows each, under Mistral's text model."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import idefics3, parts

NAME = "idefics2"
ROWS_PER_PART = 6
_SIDE, _PATCH = 56, 14


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    special = ["<unk>", "<s>", "</s>", "<fake_token_around_image>", "<image>", "<end_of_utterance>"]
    tokenizer = parts.named_tokenizer(
        special,
        {},
        bos="<s>",
        eos="<end_of_utterance>",
        pad="<unk>",
        template=idefics3.MESSAGES,
        adds_bos=True,
    )
    config = transformers.Idefics2Config(
        text_config=transformers.MistralConfig(
            **tiny_models._text_config(tokenizer),
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "image_size": _SIDE,
            "patch_size": _PATCH,
        },
        perceiver_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "resampler_n_latents": ROWS_PER_PART,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.Idefics2ForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["</s>"],
        gains={"embed_tokens": 0.5, "self_attn.o_proj.weight": 2.0},
    )
    images = Idefics2ImageProcessorPil(
        size={"shortest_edge": 2 * _PATCH, "longest_edge": _SIDE}, do_image_splitting=True
    )
    settings = {"processor_class": "Idefics2Processor", "image_seq_len": ROWS_PER_PART}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.Idefics2Processor)
