"""A tiny GLM-GA: GLM-4.6V's model under another model type, with an image processor of its own."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.glmga.image_processing_pil_glmga import GlmgaImageProcessorPil

from tests.tiny_families import glm4v, glm46v, parts

NAME = "glmga"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image."""
    tokenizer = glm4v.new_tokenizer()
    config = transformers.GlmgaConfig(
        text_config=glm4v.text_config(tokenizer) | {"model_type": "glm4v_text"},
        vision_config=glm4v.vision_config() | {"model_type": "glm4v_vision"},
        **glm4v.token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Glm46VForConditionalGeneration, config, tokenizer, seed, ends=glm4v.ENDS, gains=glm4v.GAINS
    )
    return parts.save(folder, model, glm4v.processor(transformers.Glm46VProcessor, GlmgaImageProcessorPil, tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return glm46v.load_processor(folder)
