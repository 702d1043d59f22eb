"""A tiny Kimi K2.5: one row per 28 px square, and DeepSeek-V3 text with latent attention and groups of experts."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers

from tests import tiny_models
from tests.tiny_families import mistral4, parts

NAME = "kimi_k25"
PATCH, MERGE = 14, 2
MAX_PATCHES, MAX_SIDE = 96, 32
_TOKENS = {"image_token_id": "<|media_pad|>", "video_token_id": "<|kimi_k25_video_placeholder|>"}
_SPECIAL = (
    *("[PAD]", "[BOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
)
# Queries are made in two steps.
_GAINS = {"embed_tokens": 0.5, "self_attn.q_b_proj": 2.0, "self_attn.o_proj.weight": 2.0}
# The template writes the markers around an image, as in published folders.
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with up to 40 rows per image, and a first layer without experts."""
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

    tokenizer = parts.named_tokenizer(
        [*_SPECIAL, *_TOKENS.values()], {}, bos="[BOS]", eos="<|im_end|>", pad="[PAD]", template=_TEMPLATE
    )
    config = transformers.Kimi_K25Config(
        text_config=tiny_models._text_config(tokenizer)
        | mistral4.LATENT
        | {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "patch_size": PATCH,
            "merge_kernel_size": [MERGE, MERGE],
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        projection_hidden_size=tiny_models.HIDDEN_SIZE,
        tie_word_embeddings=False,
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in _TOKENS.items()},
    )
    model = parts.random_model(transformers.Kimi_K25ForConditionalGeneration, config, tokenizer, seed, gains=_GAINS)
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("position_embeddings") and "time" not in name:
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    images = Kimi_K25ImageProcessor(
        patch_size=PATCH,
        merge_size=MERGE,
        max_patches=MAX_PATCHES,
        size={"max_height": MAX_SIDE, "max_width": MAX_SIDE},
    )
    return parts.save(folder, model, parts.whole_processor(_processor_class(), images, tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, with torchvision."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.Kimi_K25Processor)
