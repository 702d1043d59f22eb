"""A tiny thinker of Qwen3-Omni: Qwen3-VL MoE's text and tower, and an unused encoder of audio."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts, qwen2_5_omni_thinker, qwen3_vl

NAME = "qwen3_omni_moe_thinker"

_SQUARE = 32 * 32
# Configuration fields and their tokens.
_TOKENS = {
    "image_token_id": "<|IMAGE|>",
    "audio_token_id": "<|AUDIO|>",
    "video_token_id": "<|VIDEO|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows of three feature levels each, and four experts, two of them for each token."""
    named = qwen2_5_omni_thinker.NAMED
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values()],
        named,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=qwen2_5_omni_thinker.TEMPLATE,
    )
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=qwen3_vl.text_config(tokenizer)
        | {
            "model_type": "qwen3_omni_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": tiny_models.HIDDEN_SIZE,
        },
        vision_config=qwen3_vl.vision_config(),
        audio_config={
            "num_mel_bins": 8,
            "d_model": tiny_models.HIDDEN_SIZE,
            "output_dim": tiny_models.HIDDEN_SIZE,
            "downsample_hidden_size": tiny_models.HIDDEN_SIZE,
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": tiny_models.HIDDEN_SIZE,
        },
        tie_word_embeddings=False,
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in _TOKENS.items()},
    )
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE},
        patch_size=16,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    model = parts.random_model(
        transformers.Qwen3OmniMoeThinkerForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE_NORMED,
    )
    return parts.save(folder, model, parts.whole_processor(_processor_class(), images, tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend, without the parts for videos and audio."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.images_only(transformers.Qwen3OmniMoeProcessor)
