"""A tiny LLaVA-NeXT: CLIP tower of 72 px squares, five canvases of up to four tiles, Mistral's text model."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "llava_next"

_SIDE = 72
_PATCH = 24
_PINPOINTS = [[72, 144], [144, 72], [144, 144], [216, 72], [72, 216]]
# Instruction markers are plain text; a turn's images come before its text.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string"
    " else message['content'] %}"
    "{% if message['role'] == 'system' %}{{ '<<SYS>>\n' + parts[0]['text'] + '\n<</SYS>>\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for part in parts | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in parts | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}{{ ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + parts[0]['text'] + '</s> ' }}{% endif %}"
    "{% endfor %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 9 rows for the whole image, then those of its tiles with a row after each line: up to 51."""
    special = ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
    tokenizer = tiny_models._tokenizer(special, bos="<s>", eos="</s>", pad="<pad>", template=_TEMPLATE, adds_bos=True)
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=tiny_models.HIDDEN_SIZE,
            intermediate_size=2 * tiny_models.HIDDEN_SIZE,
            projection_dim=tiny_models.HIDDEN_SIZE,
            num_hidden_layers=tiny_models.NUM_LAYERS,
            num_attention_heads=4,
            image_size=_SIDE,
            patch_size=_PATCH,
        ),
        text_config=transformers.MistralConfig(
            **tiny_models._text_config(tokenizer),
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(_SIDE // _PATCH) ** 2,
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": _SIDE},
        crop_size={"height": _SIDE, "width": _SIDE},
        image_grid_pinpoints=_PINPOINTS,
    )
    settings = {"patch_size": _PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = parts.whole_processor(transformers.LlavaNextProcessor, images, tokenizer, settings)
    model = parts.random_model(
        transformers.LlavaNextForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains=parts.ATTENTIVE | {"patch_embedding.weight": 3.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.LlavaNextProcessor)
