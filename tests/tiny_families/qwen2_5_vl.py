"""A tiny Qwen2.5-VL: one row per 28 px square, tower layers with windows and one without, three rotary axes."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "qwen2_5_vl"

_SQUARE = 28 * 28
# ChatML; a conversation without a system message gets one.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
) + tiny_models.QWEN_TURN


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows and windows of two by two rows, so images have several unequal windows."""
    tokenizer = parts.qwen_tokenizer(_TEMPLATE)
    config = transformers.Qwen2_5_VLConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": tiny_models.NUM_LAYERS,
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "out_hidden_size": tiny_models.HIDDEN_SIZE,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **parts.qwen_token_ids(tokenizer),
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    processor = parts.whole_processor(_processor_class(), images, tokenizer)
    model = parts.random_model(
        transformers.Qwen2_5_VLForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE | {"merger.mlp.2.weight": 2.5},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.Qwen2_5_VLProcessor)
