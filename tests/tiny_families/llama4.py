"""A tiny Llama 4: up to 4 tiles of 56 px and the whole image, 4 rows each; text layers with chunks and with experts."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests import tiny_models
from tests.tiny_families import parts

NAME = "llama4"
TILE, PATCH = 56, 14
MAX_TILES = 4
# A prompt has tokens of several chunks, which end inside of KV blocks, and several factors of queries.
CHUNK, FLOOR_SCALE = 12, 20
_SPECIAL = (
    *("<|pad|>", "<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>"),
    *("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|patch|>"),
)
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model of four text layers: two with experts, and two with neither positions nor chunks."""
    return build_with(folder, seed, {})


def build_with(folder: pathlib.Path, seed: int, text: dict[str, Any]) -> pathlib.Path:
    """The same with other fields of the text model."""
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

    tokenizer = parts.named_tokenizer(
        _SPECIAL, {}, bos="<|begin_of_text|>", eos="<|eot|>", pad="<|pad|>", template=_TEMPLATE
    )
    config = transformers.Llama4Config(
        text_config=_text_config(tokenizer) | text,
        vision_config=_vision_config(),
        boi_token_index=tokenizer.convert_tokens_to_ids("<|image_start|>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<|image_end|>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.Llama4ForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains={"multi_modal_projector": 2.0, "self_attn.o_proj.weight": 1.5},
    )
    images = Llama4ImageProcessor(size={"height": TILE, "width": TILE}, max_patches=MAX_TILES)
    settings = {
        "processor_class": "Llama4Processor",
        "patch_size": PATCH,
        "pixel_shuffle_ratio": 0.5,
        "image_token": "<|image|>",
        "fake_image_token": "<|image|>",
    }
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, with torchvision."""
    return parts.load(folder, transformers.Llama4Processor)


def _text_config(tokenizer: Any) -> dict[str, Any]:
    return tiny_models._text_config(tokenizer) | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 2 * tiny_models.HIDDEN_SIZE,
        "moe_layers": [0, 3],
        "no_rope_layer_interval": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": CHUNK,
        "floor_scale": FLOOR_SCALE,
        "attn_scale": 4.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }


def _vision_config() -> dict[str, Any]:
    return {
        "hidden_size": tiny_models.HIDDEN_SIZE,
        # The patches of one row, side by side.
        "intermediate_size": 4 * tiny_models.HIDDEN_SIZE,
        "num_hidden_layers": tiny_models.NUM_LAYERS,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": PATCH,
        "projector_input_dim": tiny_models.HIDDEN_SIZE,
        "projector_output_dim": tiny_models.HIDDEN_SIZE,
        "vision_output_dim": tiny_models.HIDDEN_SIZE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
