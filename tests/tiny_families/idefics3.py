"""Builds a tiny Idefics3 folder: 3 × 3 tiles of 56 px at most and the whole image, 4 rows each, Llama text."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "idefics3"
TILE = 56
ROWS_PER_TILE = 4
# Published tokenizers have tokens for 6 × 6 tiles.
TILE_NAMES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))

# Roles are capitalised; there is no space between the colon and a leading image.
MESSAGES = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    special = ["<|end_of_text|>", "<|begin_of_text|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>"]
    tokenizer = parts.named_tokenizer(
        [*special, "<global-img>", *TILE_NAMES],
        {},
        bos="<|begin_of_text|>",
        eos="<end_of_utterance>",
        pad="<|end_of_text|>",
        template="<|begin_of_text|>" + MESSAGES,
    )
    config = transformers.Idefics3Config(**split_config(tokenizer))
    model = parts.random_model(
        transformers.Idefics3ForConditionalGeneration, config, tokenizer, seed, ends=["<|end_of_text|>"]
    )
    images = Idefics3ImageProcessorPil(size={"longest_edge": 3 * TILE}, max_image_size={"longest_edge": TILE})
    settings = {"processor_class": "Idefics3Processor", "image_seq_len": ROWS_PER_TILE}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.Idefics3Processor)


def split_config(tokenizer: Any) -> dict[str, Any]:
    """Fields that the configurations of Idefics3 and SmolVLM share."""
    return {
        "text_config": transformers.LlamaConfig(
            **tiny_models._text_config(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        "vision_config": {
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "image_size": TILE,
            "patch_size": 14,
        },
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
