"""A tiny LLaVA-NeXT-Video: CLIP tower of 60 px squares, canvases of up to four tiles, Llama's text model."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "llava_next_video"

SIDE = 60
PATCH = 15
_PINPOINTS = [[60, 120], [120, 60], [120, 120], [180, 60], [60, 180]]
# Vicuna's form: speakers are plain text in capitals.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'][0]['text'] }}{% else %}"
    "{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% elif message['role'] != 'system' %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>\n' }}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 16 rows for the whole image, then those of its tiles with a row after each line: up to 88."""
    special = ["<unk>", "<s>", "</s>", "<video>", "<image>", "<pad>"]
    tokenizer = tiny_models._tokenizer(special, bos="<s>", eos="</s>", pad="<pad>", template=TEMPLATE, adds_bos=True)
    config = transformers.LlavaNextVideoConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=tiny_models.HIDDEN_SIZE,
            intermediate_size=2 * tiny_models.HIDDEN_SIZE,
            projection_dim=tiny_models.HIDDEN_SIZE,
            num_hidden_layers=tiny_models.NUM_LAYERS,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=transformers.LlamaConfig(
            **tiny_models._text_config(tokenizer),
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_seq_length=(SIDE // PATCH) ** 2,
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=_PINPOINTS,
    )
    settings = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = parts.whole_processor(_processor_class(), images, tokenizer, settings)
    model = parts.random_model(
        transformers.LlavaNextVideoForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains=parts.ATTENTIVE | {"patch_embedding.weight": 3.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend, without a video processor."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.LlavaNextVideoProcessor)
