"""A tiny thinker of Qwen2.5-Omni: one row per 28 px square, three rotary axes, and an unused encoder of audio."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "qwen2_5_omni_thinker"

_SQUARE = 28 * 28
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_bos|><|IMAGE|><|vision_eos|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_bos|><|VIDEO|><|vision_eos|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Names of the tokenizer's tokens.
NAMED = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
# Configuration fields and their tokens.
_TOKENS = {
    "image_token_index": "<|IMAGE|>",
    "audio_token_index": "<|AUDIO|>",
    "video_token_index": "<|VIDEO|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows and windows of two by two rows, so images have several unequal windows."""
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *NAMED.values()],
        NAMED,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=TEMPLATE,
    )
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "qwen2_5_omni_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": tiny_models.NUM_LAYERS,
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "out_hidden_size": tiny_models.HIDDEN_SIZE,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        audio_config={
            "num_mel_bins": 8,
            "d_model": tiny_models.HIDDEN_SIZE,
            "output_dim": tiny_models.HIDDEN_SIZE,
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": tiny_models.HIDDEN_SIZE,
        },
        tie_word_embeddings=False,
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in _TOKENS.items()},
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE})
    processor = parts.whole_processor(parts.images_only(transformers.Qwen2_5OmniProcessor), images, tokenizer)
    model = parts.random_model(
        transformers.Qwen2_5OmniThinkerForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE | {"merger.mlp.2.weight": 2.5},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend, without the parts for videos and audio."""
    return parts.load(folder, parts.images_only(transformers.Qwen2_5OmniProcessor))
