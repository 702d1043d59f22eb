"""Builds a tiny Aya Vision folder: up to 4 tiles of 56 px and the whole image, 4 rows each, Cohere 2 text."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "aya_vision"
TILE = 56
SLIDING_WINDOW = 16

# A turn has one token each for its start, its speaker and its end; the assistant's answer has two more.
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{% if message['role'] == 'system' %}{{ '<|SYSTEM_TOKEN|>' }}"
    "{% elif message['role'] == 'user' %}{{ '<|USER_TOKEN|>' }}"
    "{% else %}{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<|END_RESPONSE|>' }}{% endif %}"
    "{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    turns = ["<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"]
    turns += ["<|START_RESPONSE|>", "<|END_RESPONSE|>"]
    image = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>"]
    # `<image>` is not a token but text, which the processor replaces before tokenizing.
    tiles = [*(f"TILE_{number}" for number in range(1, 13)), "TILE_GLOBAL"]
    tokenizer = parts.named_tokenizer(
        ["<PAD>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", *turns, *image, *tiles],
        {},
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        pad="<PAD>",
        template=TEMPLATE,
    )
    config = transformers.AyaVisionConfig(
        text_config=text_config(tokenizer),
        vision_config=parts.siglip_config(image_size=TILE, patch_size=14),
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        downsample_factor=2,
        tie_word_embeddings=False,
    )
    model = parts.random_model(transformers.AyaVisionForConditionalGeneration, config, tokenizer, seed)
    images = GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, crop_to_patches=True, max_patches=4)
    return tiny_models._save(folder, model, tokenizer, images, _processor_settings())


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.AyaVisionProcessor)


def text_config(tokenizer: Any) -> Any:
    """Returns four layers of Cohere 2, of which the first three have a window."""
    return transformers.Cohere2Config(
        **tiny_models._text_config(tokenizer)
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": SLIDING_WINDOW,
            "logit_scale": 0.25,
        }
    )


def _processor_settings() -> dict[str, Any]:
    """Restores the downsampling factor: saving multiplies it into the patch size and omits it."""
    return {
        "processor_class": "AyaVisionProcessor",
        "patch_size": 28,
        "img_size": TILE,
        "image_token": "<image>",
        "start_of_img_token": "<|START_OF_IMG|>",
        "end_of_img_token": "<|END_OF_IMG|>",
        "img_patch_token": "<|IMG_PATCH|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
        "tile_token": "TILE",
        "tile_global_token": "TILE_GLOBAL",
    }
