"""A tiny PaddleOCR-VL: one row per 28 px square, tower positions by grid, ERNIE 4.5 text with three rotary axes."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "paddleocr_vl"

_SQUARE = 28 * 28
# The template starts with its own token and writes a turn's images before its texts.
_TEMPLATE = (
    "{{ '<|begin_of_sentence|>' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' }}"
    "{% endif %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
# Configuration fields and their tokens. The configuration names a video token although there are no videos.
_TOKENS = {
    "image_token_id": "<|IMAGE_PLACEHOLDER|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|IMAGE_START|>",
    "vision_end_token_id": "<|IMAGE_END|>",
}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image."""
    tokenizer = parts.named_tokenizer(
        ["<unk>", "<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>", *_TOKENS.values()],
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        bos="<s>",
        eos="</s>",
        pad="<unk>",
        template=_TEMPLATE,
    )
    config = transformers.PaddleOCRVLConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "paddleocr_vl_text",
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "image_size": 112,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        tie_word_embeddings=False,
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in _TOKENS.items()},
    )
    images = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    processor = parts.whole_processor(transformers.PaddleOCRVLProcessor, images, tokenizer)
    model = parts.random_model(
        transformers.PaddleOCRVLForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.PaddleOCRVLProcessor)
