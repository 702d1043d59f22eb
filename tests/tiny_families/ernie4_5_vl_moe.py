"""A tiny ERNIE 4.5 VL: one row per 28 px square, three rotary axes, and experts of text and of images in two layers."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "ernie4_5_vl_moe"

_SQUARE = 28 * 28
# Images are numbered in the text in front of them.
_TEMPLATE = (
    "{{ '<|begin_of_sentence|>' }}{% set shown = namespace(count=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' }}"
    "{% endif %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{% set shown.count = shown.count + 1 %}"
    "{{ 'Picture ' ~ shown.count ~ ':<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|end_of_sentence|>' if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
_KINDS = {"": "PLACEHOLDER", "_start": "START", "_end": "END"}
# Names of the tokenizer's tokens; the configuration has fields of the same names with `_id`.
_NAMED = {
    f"{modality}{kind}_token": f"<|{modality.upper()}_{text}|>"
    for modality in ("image", "video")
    for kind, text in _KINDS.items()
}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows per image; its first layer has no experts."""
    tokenizer = parts.named_tokenizer(
        ["<unk>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>", *_NAMED.values()],
        _NAMED,
        bos="<|begin_of_sentence|>",
        eos="</s>",
        pad="<unk>",
        template=_TEMPLATE,
    )
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "ernie4_5_vl_moe_text",
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": [tiny_models.HIDDEN_SIZE, tiny_models.HIDDEN_SIZE // 2],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]},
        },
        vision_config={
            "depth": tiny_models.NUM_LAYERS,
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_merge_size": 2,
        },
        tie_word_embeddings=False,
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in _NAMED.items()},
    )
    images = Ernie4_5_VLMoeImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    processor = parts.whole_processor(parts.without_video(_ListsOfTokensProcessor), images, tokenizer)
    model = parts.random_model(
        transformers.Ernie4_5_VLMoeForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains=parts.ATTENTIVE | {"e_score_correction_bias": 0.1},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, parts.without_video(_ListsOfTokensProcessor))


class _ListsOfTokensProcessor(transformers.Ernie4_5_VLMoeProcessor):  # type: ignore[misc]
    """The processor without NumPy arrays of tensors, which NumPy 2 warns about."""

    def create_mm_token_type_ids(self, input_ids: Any) -> Any:
        return super().create_mm_token_type_ids([torch.as_tensor(tokens).tolist() for tokens in input_ids])

    def create_moe_mm_token_type_ids(self, input_ids: Any) -> Any:
        return torch.as_tensor(super().create_moe_mm_token_type_ids(torch.as_tensor(input_ids).numpy()))
