"""A tiny EXAONE 4.5: one row per 28 px square, a tower with windows and grouped heads, text layers with a window."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "exaone4_5"

_SQUARE = 28 * 28
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<vision><|image_pad|></vision>\n' }}"
    "{% elif part['type'] == 'video' %}{{ '<vision><|video_pad|></vision>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|endofturn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_SPECIAL = (
    *("[PAD]", "[BOS]", "<|endofturn|>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<vision>", "</vision>", "<|image_pad|>", "<|video_pad|>"),
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows; two of the four text layers see 12 tokens, the others all without positions."""
    tokenizer = tiny_models._tokenizer(
        list(_SPECIAL), bos="[BOS]", eos="<|endofturn|>", pad="[PAD]", template=_TEMPLATE
    )
    config = transformers.Exaone4_5_Config(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "exaone4",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        vision_config={
            "depth": tiny_models.NUM_LAYERS,
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "out_hidden_size": tiny_models.HIDDEN_SIZE,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        tie_word_embeddings=False,
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    processor = parts.whole_processor(_processor_class(), images, tokenizer)
    model = parts.random_model(
        transformers.Exaone4_5_ForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains=parts.ATTENTIVE_NORMED | {"merger.mlp.2.weight": 2.5},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.Exaone4_5_Processor)
