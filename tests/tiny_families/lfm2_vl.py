"""Builds a tiny LFM2-VL folder: tiles of 64 px, 4 rows each, and a text half of short convolutions and attention."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests import tiny_models
from tests.tiny_families import parts

NAME = "lfm2_vl"
TILE = 64
PATCH = 16
MAX_TILES = 4
# Published tokenizers have tokens for 10 × 10 tiles.
TILE_NAMES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11))
NAMED = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = parts.named_tokenizer(
        ["<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>", *NAMED.values(), *TILE_NAMES],
        NAMED,
        bos="<|startoftext|>",
        eos="<|im_end|>",
        pad="<|pad|>",
        template=TEMPLATE,
    )
    config = transformers.Lfm2VlConfig(
        text_config=text_config(tokenizer),
        vision_config=transformers.Siglip2VisionConfig(
            hidden_size=tiny_models.HIDDEN_SIZE,
            intermediate_size=2 * tiny_models.HIDDEN_SIZE,
            num_hidden_layers=tiny_models.NUM_LAYERS,
            num_attention_heads=4,
            num_patches=16,
            patch_size=PATCH,
        ),
        projector_hidden_size=tiny_models.HIDDEN_SIZE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.Lfm2VlForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE
    )
    return parts.save(folder, model, processor(tokenizer))


def processor(tokenizer: Any) -> Any:
    """Returns the whole processor: 4 to 32 rows for a whole image, and at most four tiles."""
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    images = Lfm2VlImageProcessor(
        tile_size=TILE, encoder_patch_size=PATCH, min_image_tokens=4, max_image_tokens=32, max_tiles=MAX_TILES
    )
    return parts.whole_processor(transformers.Lfm2VlProcessor, images, tokenizer)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor of a folder that `build` wrote."""
    return parts.load(folder, transformers.Lfm2VlProcessor)


def text_config(tokenizer: Any) -> Any:
    """Returns five layers, of which the second and the fourth have attention."""
    sizes = tiny_models._text_config(tokenizer)
    return transformers.Lfm2Config(
        **sizes
        | {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
        }
    )
