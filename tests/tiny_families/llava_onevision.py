"""A tiny LLaVA-OneVision: SigLIP tower of 64 px squares, up to nine tiles, at most two tiles' worth of rows."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import transformers
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "llava_onevision"

SIDE = 64
PATCH = 16
_PINPOINTS = [[SIDE * lines, SIDE * columns] for lines, columns in itertools.product((1, 2, 3), repeat=2)]
_ASPECT = "anyres_max_2"
# ChatML with a space after the role; a turn's images come before its text, separated by a line break.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string"
    " else message['content'] %}"
    "{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for part in parts | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in parts | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}"
    "{% for part in parts | selectattr('type', 'equalto', 'text') %}{{ '\n' + part['text'] }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 16 rows for the whole image and more for its tiles: up to 56, or 17 next to other images."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
    tokenizer = tiny_models._tokenizer(special, bos=None, eos="<|im_end|>", pad="<|endoftext|>", template=_TEMPLATE)
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=tiny_models.HIDDEN_SIZE,
            intermediate_size=2 * tiny_models.HIDDEN_SIZE,
            num_hidden_layers=tiny_models.NUM_LAYERS,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        text_config=transformers.Qwen2Config(
            **tiny_models._text_config(tokenizer),
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_aspect_ratio=_ASPECT,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = LlavaOnevisionImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        image_grid_pinpoints=_PINPOINTS,
    )
    settings = {
        "num_image_tokens": (SIDE // PATCH) ** 2,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": _ASPECT,
    }
    processor = parts.whole_processor(_processor_class(), images, tokenizer, settings)
    model = parts.random_model(
        transformers.LlavaOnevisionForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE | {"patch_embedding.weight": 3.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.LlavaOnevisionProcessor)
