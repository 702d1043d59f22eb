"""A tiny GLM-4.6V: GLM-4.1V's tower and language model in a configuration that names both."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

from tests.tiny_families import glm4v, parts

NAME = "glm46v"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image."""
    tokenizer = glm4v.new_tokenizer()
    config = transformers.Glm46VConfig(
        text_config=glm4v.text_config(tokenizer) | {"model_type": "glm4v_text"},
        vision_config=glm4v.vision_config() | {"model_type": "glm4v_vision"},
        **glm4v.token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Glm46VForConditionalGeneration, config, tokenizer, seed, ends=glm4v.ENDS, gains=glm4v.GAINS
    )
    return parts.save(folder, model, glm4v.processor(transformers.Glm46VProcessor, Glm46VImageProcessorPil, tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, glm4v.with_lists_of_tokens(transformers.Glm46VProcessor))
