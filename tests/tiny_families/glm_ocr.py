"""A tiny GLM-OCR: one row per 28 px square, normed queries and keys in the tower, heads of 32 rotated as a whole."""

from __future__ import annotations

import pathlib

import transformers
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

from tests.tiny_families import glm4v, glm46v, parts

NAME = "glm_ocr"

# Its published folder has GLM-4.6V's processor.
load_processor = glm46v.load_processor


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image."""
    tokenizer = glm4v.new_tokenizer()
    config = transformers.GlmOcrConfig(
        text_config=glm4v.text_config(tokenizer)
        | {
            "model_type": "glm_ocr_text",
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        },
        vision_config=glm4v.vision_config(),
        **glm4v.token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.GlmOcrForConditionalGeneration, config, tokenizer, seed, ends=glm4v.ENDS, gains=glm4v.GAINS
    )
    return parts.save(folder, model, glm4v.processor(transformers.Glm46VProcessor, Glm46VImageProcessorPil, tokenizer))
