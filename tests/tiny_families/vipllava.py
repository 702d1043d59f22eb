"""A tiny ViP-LLaVA: CLIP tower of 56 px squares, rows of three of its five layers, Llama's text model."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "vipllava"

_SIDE = 56
_PATCH = 14
# Speakers are plain text, and a turn begins with three signs.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '###Human: ' }}"
    "{% elif message['role'] == 'assistant' %}{{ '###Assistant: ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '###Assistant:' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 16 rows per image. As in published ones, the layers are counted from both ends."""
    special = ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
    tokenizer = tiny_models._tokenizer(special, bos="<s>", eos="</s>", pad="<pad>", template=_TEMPLATE, adds_bos=True)
    config = transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=tiny_models.HIDDEN_SIZE,
            intermediate_size=2 * tiny_models.HIDDEN_SIZE,
            projection_dim=tiny_models.HIDDEN_SIZE,
            num_hidden_layers=5,
            num_attention_heads=4,
            image_size=_SIDE,
            patch_size=_PATCH,
        ),
        text_config=transformers.LlamaConfig(
            **tiny_models._text_config(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(_SIDE // _PATCH) ** 2,
        vision_feature_layer=[-2, -4, 1],
        tie_word_embeddings=False,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE})
    settings = {"patch_size": _PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = parts.whole_processor(transformers.LlavaProcessor, images, tokenizer, settings)
    model = parts.random_model(
        transformers.VipLlavaForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains=parts.ATTENTIVE | {"patch_embedding.weight": 3.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.LlavaProcessor)
