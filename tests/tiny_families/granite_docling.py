"""A tiny Granite Docling: up to 6 tiles of 56 px and the whole page, 4 rows each with features of two layers."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil

from tests import tiny_models
from tests.tiny_families import idefics3, parts

NAME = "granite_docling"
TILE = 56
ROWS_PER_TILE = 4

_TEMPLATE = (
    "{% for message in messages %}{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0, most_tiles: int = 6, is_fine: bool = False) -> pathlib.Path:
    """Writes the model's folder and returns its path. `is_fine` chooses the connector with four times the rows."""
    special = ["<|pad|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"]
    tokenizer = parts.named_tokenizer(
        [*special, "<fake_token_around_image>", "<image>", "<global-img>", *idefics3.TILE_NAMES],
        {},
        bos=None,
        eos="<|end_of_text|>",
        pad="<|pad|>",
        template=_TEMPLATE,
    )
    config = transformers.GraniteDoclingConfig(
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "image_size": TILE,
            "patch_size": 7,
            "out_hidden_size": tiny_models.HIDDEN_SIZE,
            "scale_factor": 4,
            "deepstack_visual_indexes": [0, 1],
        },
        # Granite scales embeddings, attention, residuals and logits. No factor is 1, so that each one matters.
        text_config=tiny_models._text_config(tokenizer)
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.8,
            "logits_scaling": 4.0,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        density_router_hidden_size=16,
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.GraniteDoclingForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE
    )
    images = GraniteDoclingImageProcessorPil(
        size={"height": TILE, "width": TILE}, max_patches=most_tiles, fine_route=is_fine
    )
    settings = {"processor_class": "GraniteDoclingProcessor", "image_seq_len": ROWS_PER_TILE}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.GraniteDoclingProcessor)
