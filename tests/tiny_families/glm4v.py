"""A tiny GLM-4.1V: one row per 28 px square, learned tower positions, fused gates, several stop tokens."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "glm4v"

# The processor counts a still image as two frames.
_SQUARE = 2 * 28 * 28
_TEMPLATE = (
    "[gMASK]<sop>"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|begin_of_image|><|image|><|end_of_image|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|begin_of_video|><|video|><|end_of_video|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Tokens that end an answer besides EOS, and factors on weights that make answers depend on the image.
ENDS = ("<|user|>", "<|observation|>")
GAINS = {"embed_tokens": 0.5, "merger.down_proj.weight": 4.0}
# Configuration fields and their tokens.
_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image. It has no BOS; the template starts with its own prefix."""
    tokenizer = new_tokenizer()
    config = transformers.Glm4vConfig(
        text_config=text_config(tokenizer) | {"model_type": "glm4v_text"},
        vision_config=vision_config(),
        **token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Glm4vForConditionalGeneration, config, tokenizer, seed, ends=ENDS, gains=GAINS
    )
    return parts.save(folder, model, processor(transformers.Glm4vProcessor, Glm4vImageProcessorPil, tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, with_lists_of_tokens(transformers.Glm4vProcessor))


def new_tokenizer() -> Any:
    """Trains a tokenizer with the special tokens of GLM's vision-language models."""
    special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    special += _TOKENS.values()
    return tiny_models._tokenizer(special, bos=None, eos="<|endoftext|>", pad="<|endoftext|>", template=_TEMPLATE)


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the fields of a GLM configuration that name tokens."""
    return {field: tokenizer.convert_tokens_to_ids(token) for field, token in _TOKENS.items()}


def text_config(tokenizer: Any) -> dict[str, Any]:
    """Returns layers that rotate half of each head, with three rotary axes."""
    return tiny_models._text_config(tokenizer) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        }
    }


def vision_config() -> dict[str, Any]:
    """Returns a tower with one row per 28 px square; positions, if it learns any, are on an 8 × 8 grid."""
    return {
        "depth": tiny_models.NUM_LAYERS,
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
        "out_hidden_size": tiny_models.HIDDEN_SIZE,
        "num_heads": 4,
        "image_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def processor(processor_class: Any, image_processor_class: Any, tokenizer: Any) -> Any:
    """Returns the whole processor of a new folder."""
    images = image_processor_class(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    return parts.whole_processor(parts.without_video(processor_class), images, tokenizer)


def with_lists_of_tokens(processor_class: Any) -> Any:
    """Returns a processor class without video processor, and with lists of tokens.

    The original makes NumPy arrays of tensors, which NumPy 2 warns about.
    """

    def create_mm_token_type_ids(self: Any, input_ids: Any) -> Any:
        return processor_class.create_mm_token_type_ids(self, [torch.as_tensor(ids).tolist() for ids in input_ids])

    changed = {"create_mm_token_type_ids": create_mm_token_type_ids}
    return type(processor_class.__name__, (parts.without_video(processor_class),), changed)
