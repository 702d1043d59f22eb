"""Builds a tiny Gemma 3 folder: 16 rows per image, four of six layers with a window of 10 tokens."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "gemma3"
ROWS_PER_IMAGE = 16
SLIDING_WINDOW = 10

# A system message is put before the first user turn; texts are trimmed; the assistant is called "model".
_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% if messages[0]['content'] is string %}{% set prefix = messages[0]['content'] + '\n\n' %}"
    "{% else %}{% set prefix = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% set turns = messages[1:] %}"
    "{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = parts.named_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *named.values()],
        named,
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        template=_TEMPLATE,
    )
    parts.add_gemma_whitespace(tokenizer)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    config = transformers.Gemma3Config(
        text_config=_text_config(tokenizer),
        vision_config=parts.siglip_config(image_size=64, patch_size=8),
        mm_tokens_per_image=ROWS_PER_IMAGE,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.Gemma3ForConditionalGeneration, config, tokenizer, seed, ends=["<end_of_turn>"]
    )
    parts.centre_gemma(model.model.language_model)
    with torch.no_grad():
        model.model.multi_modal_projector.mm_soft_emb_norm.weight -= 1.0
    images = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    settings = {"processor_class": "Gemma3Processor", "image_seq_length": ROWS_PER_IMAGE}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.Gemma3Processor)


def _text_config(tokenizer: Any) -> Any:
    return transformers.Gemma3TextConfig(
        **parts.gemma_text_config(tokenizer)
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": SLIDING_WINDOW,
            "query_pre_attn_scalar": 16,
        }
    )
