"""A tiny DeepSeek-OCR 2: tiles of 192 px with 144 rows, pages of 256 px with 256 rows, text with experts.

The model fixes the numbers of rows, so images have more rows than in other tiny models. All layers of SAM's tower have
windows, because layers without one would be slow on 64 × 64 patches.
"""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "deepseek_ocr2"

_PATCH = 4
_SAM_SIZE = 32
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|User|>: ' if message['role'] == 'user' else '<|Assistant|>: ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token if message['role'] == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>:' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 257 rows per page, and 144 for each of two to six tiles if a page is larger than a tile."""
    tokenizer = parts.named_tokenizer(
        ["<|begin|>", "<|end|>", "<|pad|>", "<image>", "<|User|>", "<|Assistant|>"],
        {},
        bos="<|begin|>",
        eos="<|end|>",
        pad="<|pad|>",
        template=_TEMPLATE,
    )
    config = transformers.DeepseekOcr2Config(
        vision_config={"sam_config": _sam_config(), "encoder_config": _encoder_config()},
        text_config=tiny_models._text_config(tokenizer)
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.DeepseekOcr2ForConditionalGeneration, config, tokenizer, seed, gains=_gains()
    )
    images = DeepseekOcr2ImageProcessorPil(size={"height": 64 * _PATCH, "width": 64 * _PATCH}, tile_size=48 * _PATCH)
    settings = {"processor_class": "DeepseekOcr2Processor", "patch_size": _PATCH, "downsample_ratio": 4}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.DeepseekOcr2Processor)


def _gains() -> dict[str, float]:
    """Returns the usual gains for the language model, and less attention for the tower, whose layers are named alike.

    With 257 rows per page, a sharper tower would have a row that is imprecise in bfloat16.
    """
    of_layers = {name: gain for name, gain in parts.ATTENTIVE.items() if name.startswith("self_attn")}
    gains = {name: gain for name, gain in parts.ATTENTIVE.items() if name not in of_layers}
    for layer in range(tiny_models.NUM_LAYERS):
        gains |= {f"language_model.layers.{layer}.{name}": gain for name, gain in of_layers.items()}
        gains[f"vision_encoder.layers.{layer}.self_attn.q_proj"] = 0.5
    return gains


def _sam_config() -> dict[str, Any]:
    return {
        "hidden_size": _SAM_SIZE,
        "output_channels": _SAM_SIZE,
        "downsample_channels": [_SAM_SIZE, tiny_models.HIDDEN_SIZE],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64 * _PATCH,
        "patch_size": _PATCH,
        "window_size": 14,
        "global_attn_indexes": [],
        "mlp_ratio": 2.0,
    }


def _encoder_config() -> dict[str, Any]:
    return {
        "vocab_size": 1,
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
        "num_hidden_layers": tiny_models.NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
