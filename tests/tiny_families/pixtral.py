"""A tiny Pixtral, which is a LLaVA with Pixtral's tower: one row per 16 px patch, a break token after each line."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "pixtral"

_PATCH = 16
_LONGEST = 7 * _PATCH
# The template writes BOS, so the tokenizer adds none. The system text is part of the last turn.
_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{{ bos_token }}{% for message in turns %}"
    "{% if message['role'] == 'user' %}{{ '[INST]' }}"
    "{% if loop.last and system is defined %}"
    "{{ (system if system is string else system[0]['text']) + '\n\n' }}{% endif %}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '[IMG]' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '[/INST]' if message['role'] == 'user' else eos_token }}{% endfor %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with up to 7 × 7 rows by size."""
    tokenizer = tiny_models._tokenizer(
        list(parts.MISTRAL_SPECIAL), bos="<s>", eos="</s>", pad="<pad>", template=_TEMPLATE
    )
    config = transformers.LlavaConfig(
        vision_config=parts.pixtral_vision(_LONGEST, _PATCH),
        text_config=transformers.MistralConfig(
            **tiny_models._text_config(tokenizer),
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        image_seq_length=1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = PixtralImageProcessorPil(size={"longest_edge": _LONGEST}, patch_size={"height": _PATCH, "width": _PATCH})
    processor = parts.whole_processor(parts.pixtral_processor_class(), images, tokenizer, {"patch_size": _PATCH})
    model = parts.random_model(
        transformers.LlavaForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, parts.pixtral_processor_class())
