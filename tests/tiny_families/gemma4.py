"""A tiny Gemma 4 of the smaller kind: three of six layers read the keys of others, and tokens join every layer.

Heads of layers without a window are twice as large. The folder has an encoder of audio, which is not used.
"""

from __future__ import annotations

import functools
import math
import pathlib
from typing import Any

import torch
import transformers
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "gemma4"
SLIDING_WINDOW = 10
# Layers of the text half; the last half of them has no keys of its own.
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
PATCH_SIZE = 4

# A system message is a turn of its own; texts are trimmed; the assistant is called "model".
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<|turn>' + role + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '\n\n<|image|>\n\n' }}"
    "{% elif part['type'] == 'video' %}{{ '\n\n<|video|>\n\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
_NAMED = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
_VIDEO_TOKEN = "<|video|>"
# Configuration fields and their tokens.
_TOKENS = {
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "image_token_id": "<|image|>",
    "video_token_id": _VIDEO_TOKEN,
    "boa_token_id": "<|audio>",
    "eoa_token_index": "<audio|>",
    "audio_token_id": "<|audio|>",
}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    text = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16}
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
    return build_with(folder, seed, text, {"use_clipped_linears": True}, audio)


def build_with(
    folder: pathlib.Path, seed: int, text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any] | None
) -> pathlib.Path:
    """Writes a folder with these settings of the text half and of the towers."""
    tokenizer = trained_tokenizer()
    shared = text_fields(tokenizer) | {
        "vocab_size_per_layer_input": len(tokenizer),
        "hidden_size_per_layer_input": 0,
    }
    config = transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**(shared | text)),
        vision_config=transformers.Gemma4VisionConfig(**(_vision() | vision)),
        audio_config=None if audio is None else transformers.Gemma4AudioConfig(**audio),
        tie_word_embeddings=False,
        **token_ids(tokenizer),
    )
    model = parts.random_model(transformers.Gemma4ForConditionalGeneration, config, tokenizer, seed, ends=["<turn|>"])
    finish(model, seed)
    images = Gemma4ImageProcessorPil(patch_size=PATCH_SIZE, max_soft_tokens=70)
    return tiny_models._save(folder, model, tokenizer, images, {"processor_class": "Gemma4Processor"})


def trained_tokenizer() -> Any:
    """Trains a tokenizer with the special tokens and the chat template."""
    tokenizer = parts.named_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", *_NAMED.values(), _VIDEO_TOKEN],
        _NAMED,
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        template=_TEMPLATE,
    )
    parts.add_gemma_whitespace(tokenizer)
    return tokenizer


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the configuration's fields that name tokens."""
    return {field: tokenizer.convert_tokens_to_ids(token) for field, token in _TOKENS.items()}


def text_fields(tokenizer: Any) -> dict[str, Any]:
    """Returns fields of all text configurations."""
    return parts.gemma_text_config(tokenizer) | {
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": LAYER_TYPES,
        "sliding_window": SLIDING_WINDOW,
        "global_head_dim": 32,
        "final_logit_softcapping": 30.0,
    }


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the processor on the PIL backend, without audio and videos."""
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor_of(folder, images, transformers.Gemma4Processor)


def processor_of(folder: pathlib.Path, images: Any, base: Any) -> Any:
    """Returns a processor of the class `base`, without audio and videos."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    absent = {"feature_extractor": None, "video_processor": None}
    return parts.whole_processor(_images_only(base), images, tokenizer, absent)


@functools.cache
def _images_only(base: Any) -> Any:
    def check(self: Any, argument_name: str, argument: object) -> object:
        if argument is None and argument_name in ("video_processor", "feature_extractor"):
            return None
        return base.check_argument_for_proper_class(self, argument_name, argument)

    return type(base.__name__, (base,), {"check_argument_for_proper_class": check})


def _vision() -> dict[str, Any]:
    return {
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
        "num_hidden_layers": tiny_models.NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "patch_size": PATCH_SIZE,
        "position_embedding_size": 256,
    }


def finish(model: Any, seed: int) -> None:
    """Draws the buffers, which are weights here, and scales embeddings, which the model multiplies by √width."""
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        text_model = model.model.language_model
        text_model.embed_tokens.weight /= math.sqrt(text_model.config.hidden_size)
        if getattr(text_model, "hidden_size_per_layer_input", 0):
            text_model.embed_tokens_per_layer.weight /= math.sqrt(text_model.hidden_size_per_layer_input)
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                # Attention does not divide by √head_dim. Sharper attention would multiply differences in rounding.
                parameter.mul_(0.8)
        for name, buffer in model.named_buffers():
            noise = torch.rand(buffer.shape, generator=generator)
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + noise)
            elif name.endswith("std_bias"):
                buffer.copy_(noise - 0.5)
            elif name.endswith("std_scale"):
                buffer.copy_(0.1 + noise)
            elif "vision" in name and name.endswith(("_min", "_max")):
                # Bounds that cut some numbers off.
                buffer.copy_((1.0 + noise) * (1 if name.endswith("max") else -1))
