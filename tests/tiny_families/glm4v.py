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
    special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    special += _TOKENS.values()
    tokenizer = tiny_models._tokenizer(special, bos=None, eos="<|endoftext|>", pad="<|endoftext|>", template=_TEMPLATE)
    config = transformers.Glm4vConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "glm4v_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": tiny_models.NUM_LAYERS,
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "out_hidden_size": tiny_models.HIDDEN_SIZE,
            "num_heads": 4,
            "image_size": 112,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in _TOKENS.items()},
    )
    images = Glm4vImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    processor = parts.whole_processor(parts.without_video(transformers.Glm4vProcessor), images, tokenizer)
    model = parts.random_model(
        transformers.Glm4vForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|user|>", "<|observation|>"],
        gains={"embed_tokens": 0.5, "merger.down_proj.weight": 4.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, parts.without_video(_ListsOfTokensProcessor))


class _ListsOfTokensProcessor(transformers.Glm4vProcessor):  # type: ignore[misc]
    """The processor with lists of tokens: the original makes NumPy arrays of tensors, which NumPy 2 warns about."""

    def create_mm_token_type_ids(self, input_ids: Any) -> Any:
        return super().create_mm_token_type_ids([torch.as_tensor(tokens).tolist() for tokens in input_ids])
