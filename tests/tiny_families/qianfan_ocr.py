"""A tiny Qianfan-OCR: InternVL's tiles of 84 px with 9 rows each, a placeholder of plain text, Qwen3 text."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import internvl, parts

NAME = "qianfan_ocr"

# ChatML; an image is a text that has no token of its own, and a line break.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NAMED = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with up to 4 tiles and the whole image."""
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_NAMED.values()],
        _NAMED,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=_TEMPLATE,
    )
    config = transformers.QianfanOCRConfig(
        vision_config=internvl.vision_config(),
        text_config=parts.qwen3_text(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=internvl.ROWS_PER_TILE,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.QianfanOCRForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE_NORMED
    )
    internvl.open_layers(model.model.vision_tower)
    images = GotOcr2ImageProcessorPil(
        size={"height": internvl.TILE, "width": internvl.TILE}, crop_to_patches=False, max_patches=4
    )
    settings = {
        "processor_class": "QianfanOCRProcessor",
        "image_seq_length": internvl.ROWS_PER_TILE,
        "image_placeholder_token": "<image>",
    }
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.QianfanOCRProcessor)
