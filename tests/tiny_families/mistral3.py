"""A tiny Mistral Small 3: Pixtral's tower, one row per two by two patches of 14 px, a break token after each line."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "mistral3"

_PATCH = 14
_MERGE = 2
_LONGEST = 7 * _PATCH * _MERGE
# The template writes BOS, so the tokenizer adds none.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string"
    " else message['content'] %}"
    "{% if message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST]' }}{% endif %}"
    "{% for part in parts %}{% if part['type'] == 'image' %}{{ '[IMG]' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "{% if message['role'] == 'system' %}{{ '[/SYSTEM_PROMPT]' }}"
    "{% elif message['role'] == 'user' %}{{ '[/INST]' }}{% else %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with up to 7 × 7 rows by size, and heads wider than the hidden size divided by their number."""

    def text_config(tokenizer: Any) -> Any:
        return transformers.MistralConfig(
            **tiny_models._text_config(tokenizer),
            head_dim=32,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )

    return with_text(folder, text_config, parts.ATTENTIVE, seed)


def with_text(
    folder: pathlib.Path, text_config: Callable[[Any], Any], gains: Mapping[str, float], seed: int
) -> pathlib.Path:
    """Builds a model with the text half that `text_config` describes, given the tokenizer."""
    special = [*parts.MISTRAL_SPECIAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    tokenizer = tiny_models._tokenizer(special, bos="<s>", eos="</s>", pad="<pad>", template=_TEMPLATE)
    config = transformers.Mistral3Config(
        vision_config=parts.pixtral_vision(_LONGEST, _PATCH),
        text_config=text_config(tokenizer),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=_MERGE,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    # The tower's patch size; the whole processor multiplies it by the merge size.
    images = PixtralImageProcessorPil(size={"longest_edge": _LONGEST}, patch_size={"height": _PATCH, "width": _PATCH})
    settings = {"patch_size": _PATCH, "spatial_merge_size": _MERGE}
    processor = parts.whole_processor(parts.pixtral_processor_class(), images, tokenizer, settings)
    model = parts.random_model(transformers.Mistral3ForConditionalGeneration, config, tokenizer, seed, gains=gains)
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, parts.pixtral_processor_class())
