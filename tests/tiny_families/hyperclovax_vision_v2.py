"""A tiny HyperCLOVA X: one row per 28 px square, text with a second norm per layer and four factors other than 1."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "hyperclovax_vision_v2"

_SQUARE = 28 * 28
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image_start|><|IMAGE_PAD|><|image_end|>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NAMED = {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image."""
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_start|>", "<|image_end|>", *_NAMED.values()],
        _NAMED,
        bos="<|endoftext|>",
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=_TEMPLATE,
    )
    config = transformers.HyperCLOVAXVisionV2Config(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "hyperclovax",
            "head_dim": 16,
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        vision_config={
            "model_type": "qwen2_5_vl_vision",
            "depth": tiny_models.NUM_LAYERS,
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "out_hidden_size": tiny_models.HIDDEN_SIZE // 2,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|IMAGE_PAD|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|VIDEO_PAD|>"),
        tie_word_embeddings=False,
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    processor = parts.whole_processor(_processor_class(), images, tokenizer)
    model = parts.random_model(
        transformers.HyperCLOVAXVisionV2ForConditionalGeneration,
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
    return parts.without_video(transformers.HyperCLOVAXVisionV2Processor)
