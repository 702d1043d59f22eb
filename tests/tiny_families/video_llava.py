"""A tiny Video-LLaVA: two CLIP towers of 56 px squares, for images and for frames, and Llama's text model."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.video_llava.image_processing_video_llava import VideoLlavaImageProcessor

from tests import tiny_models
from tests.tiny_families import llava_next_video, parts

NAME = "video_llava"

SIDE = 56
PATCH = 14


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 16 rows per image, and 17 per frame."""
    special = ["<unk>", "<s>", "</s>", "<video>", "<image>", "<pad>"]
    tokenizer = tiny_models._tokenizer(
        special, bos="<s>", eos="</s>", pad="<pad>", template=llava_next_video.TEMPLATE, adds_bos=True
    )
    config = transformers.VideoLlavaConfig(
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
            **tiny_models._text_config(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )
    images = VideoLlavaImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    settings = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = parts.whole_processor(_processor_class(), images, tokenizer, settings)
    model = parts.random_model(
        transformers.VideoLlavaForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains=parts.ATTENTIVE | {"patch_embedding.weight": 3.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor without a video processor, which needs torchvision."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.VideoLlavaProcessor)
