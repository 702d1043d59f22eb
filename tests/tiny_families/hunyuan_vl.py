"""A tiny HunyuanOCR: one row per 32 px square, per line and per end of an image; four rotary axes, normed attention."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import HunYuanVLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "hunyuan_vl"

_SQUARE = 32 * 32
_BOS = "<｜hy_begin▁of▁sentence｜>"
_EOS = "<｜hy_end▁of▁sentence｜>"
_PAD = "<｜hy_▁pad▁｜>"
_IMAGE = "<｜hy_place▁holder▁no▁102｜>"
_IMAGE_START = "<｜hy_place▁holder▁no▁100｜>"
_IMAGE_END = "<｜hy_place▁holder▁no▁101｜>"
# The template starts with BOS and marks the end of each message.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    f"{{{{ '{_IMAGE_START}{_IMAGE}{_IMAGE_END}' }}}}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '<｜hy_User｜>' }}{% elif message['role'] == 'assistant' %}"
    "{{ '<｜hy_Assistant｜>' }}{% else %}{{ '<｜hy_place▁holder▁no▁3｜>' }}{% endif %}{% endfor %}"
)
_SPECIAL = (
    *(_BOS, _EOS, _PAD, _IMAGE_START, _IMAGE_END, _IMAGE),
    *("<｜hy_User｜>", "<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁3｜>"),
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 8 to about 60 rows per image.

    The rotary base is small, so that all axes matter within a few tokens.
    """
    tokenizer = parts.named_tokenizer(
        _SPECIAL,
        {"image_token": _IMAGE, "image_start_token": _IMAGE_START, "image_end_token": _IMAGE_END},
        bos=_BOS,
        eos=_EOS,
        pad=_PAD,
        template=_TEMPLATE,
    )
    config = transformers.HunYuanVLConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "hunyuan_vl_text",
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 4.0,
                "factor": 1.0,
                "alpha": 2.0,
                "mrope_section": [2, 2, 2, 2],
            },
        },
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "out_hidden_size": tiny_models.HIDDEN_SIZE,
            "max_image_size": 128,
            "patch_size": 16,
            "spatial_merge_size": 2,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE),
        im_start_id=tokenizer.convert_tokens_to_ids(_IMAGE_START),
        im_end_id=tokenizer.convert_tokens_to_ids(_IMAGE_END),
        tie_word_embeddings=False,
    )
    images = HunYuanVLImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    processor = parts.whole_processor(transformers.HunYuanVLProcessor, images, tokenizer)
    model = parts.random_model(
        transformers.HunYuanVLForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<｜hy_Assistant｜>"],
        gains={"embed_tokens": 0.5, "query_layernorm": 2.0, "key_layernorm": 2.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.HunYuanVLProcessor)
