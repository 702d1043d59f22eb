"""A tiny VideoLLaMA 3: one row per 14 px square, tower positions by grid, Qwen2 text with positions in sequence."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "video_llama_3"

_SQUARE = 14 * 14
# ChatML; a line break follows each image, and no markers surround it.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image_pad|>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image."""
    tokenizer = parts.qwen_tokenizer(_TEMPLATE)
    token_ids = parts.qwen_token_ids(tokenizer)
    config = transformers.VideoLlama3Config(
        text_config=tiny_models._text_config(tokenizer)
        | {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "patch_size": 14,
        },
        image_token_id=token_ids["image_token_id"],
        video_token_id=token_ids["video_token_id"],
        tie_word_embeddings=False,
    )
    images = VideoLlama3ImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    processor = parts.whole_processor(_processor_class(), images, tokenizer)
    model = parts.random_model(
        transformers.VideoLlama3ForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE | {"projector.readout.2.weight": 2.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.VideoLlama3Processor)
