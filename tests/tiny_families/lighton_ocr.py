"""A tiny LightOnOCR: Pixtral's tower, one row per two by two patches of 14 px, Qwen3 text."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.tiny_families import parts

NAME = "lighton_ocr"

_PATCH = 14
_MERGE = 2
_LONGEST = 7 * _PATCH * _MERGE
# ChatML with an image's token alone. The processor reads the names of three tokens and writes only the first.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image_pad|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NAMED = {
    "image_token": "<|image_pad|>",
    "image_break_token": "<|vision_pad|>",
    "image_end_token": "<|vision_end|>",
}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with up to 7 × 7 rows by size."""
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_NAMED.values()],
        _NAMED,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=_TEMPLATE,
    )
    config = transformers.LightOnOcrConfig(
        vision_config=parts.pixtral_vision(_LONGEST, _PATCH),
        text_config=parts.qwen3_text(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        spatial_merge_size=_MERGE,
        tie_word_embeddings=False,
    )
    side = _PATCH * _MERGE
    images = PixtralImageProcessorPil(size={"longest_edge": _LONGEST}, patch_size={"height": side, "width": side})
    settings = {"patch_size": _PATCH, "spatial_merge_size": _MERGE}
    processor = parts.whole_processor(transformers.LightOnOcrProcessor, images, tokenizer, settings)
    model = parts.random_model(
        transformers.LightOnOcrForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE_NORMED
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.LightOnOcrProcessor)
