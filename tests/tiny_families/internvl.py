"""Builds a tiny InternVL 3 folder: up to 4 tiles of 84 px and the whole image, 9 rows each, Qwen2 text."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "internvl"
TILE = 84
ROWS_PER_TILE = 9

# ChatML; an image is the token of one row and a line break.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values()],
        named,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=_TEMPLATE,
    )
    config = transformers.InternVLConfig(
        vision_config=vision_config(),
        text_config=transformers.Qwen2Config(
            **tiny_models._text_config(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=ROWS_PER_TILE,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    model = parts.random_model(transformers.InternVLForConditionalGeneration, config, tokenizer, seed)
    open_layers(model.model.vision_tower)
    # Published files leave tiling off, and the whole processor switches it on.
    images = GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, crop_to_patches=False, max_patches=4)
    settings = {"processor_class": "InternVLProcessor", "image_seq_length": ROWS_PER_TILE}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend, without a video processor."""
    return parts.load(folder, parts.without_video(transformers.InternVLProcessor))


def vision_config() -> dict[str, Any]:
    """Returns the tower's configuration, which Qianfan-OCR shares."""
    return {
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
        "num_hidden_layers": tiny_models.NUM_LAYERS,
        "num_attention_heads": 4,
        "image_size": [TILE, TILE],
        "patch_size": [14, 14],
        "attention_bias": True,
    }


def open_layers(tower: Any) -> None:
    """Sets the scales before each residual to larger values: around 0 they would suppress attention and MLP."""
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if "lambda_" in name:
                parameter.add_(1.0)
