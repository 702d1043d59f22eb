"""Builds Qwen2.5-VL folders of published shapes with random weights, which are drawn on the device.

Drawing 7 billion weights takes seconds there. The folder is then loaded like any other.
"""

from __future__ import annotations

import math
import pathlib
import shutil
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.models import QWEN_SPECIAL, qwen_tokenizer, save_processor, token_ids

_SEED = 20261127
# The tower of Qwen2.5-VL: 32 layers of 1280 with windows of 112 pixels, four layers without.
_TOWER = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of a language model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool


# The language models of Qwen2-VL-2B and Qwen2.5-VL-7B.
SHAPES = {
    "2b": TextShape(1536, 8960, 28, 12, 2, 151_936, tie_word_embeddings=True),
    "7b": TextShape(3584, 18_944, 28, 28, 4, 152_064, tie_word_embeddings=False),
    # For tests of this module.
    "tiny": TextShape(64, 96, 2, 4, 2, 1536, tie_word_embeddings=True),
}
_TINY_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "fullatt_block_indexes": [1]}


def shaped_folder(name: str, parent: pathlib.Path, device: torch.device) -> pathlib.Path:
    """Returns the folder of a shape in `parent`, and writes it if it is not there: 15 GiB for 7b in bfloat16."""
    folder = parent / f"qwen2.5-vl-{name}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(name, unfinished, device)
        unfinished.rename(folder)
    return folder


def _write(name: str, folder: pathlib.Path, device: torch.device) -> None:
    shape = SHAPES[name]
    tokenizer = qwen_tokenizer()
    tower = _TOWER | (_TINY_TOWER if name == "tiny" else {})
    head_dim = shape.hidden_size // shape.num_attention_heads
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIAL}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "model_type": "qwen2_5_vl_text", "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size, "num_hidden_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads, "num_key_value_heads": shape.num_key_value_heads,
            "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tie_word_embeddings,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6,
                "mrope_section": [head_dim // 8, head_dim * 3 // 16, head_dim * 3 // 16],
            },
            **token_ids(tokenizer),
        },
        vision_config={**tower, "out_hidden_size": shape.hidden_size},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=shape.tie_word_embeddings, dtype=torch.bfloat16,
    )  # fmt: skip
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)
    generation = transformers.GenerationConfig(**token_ids(tokenizer))
    generation.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28})
    save_processor(folder, tokenizer, processor, {"processor_class": "Qwen2_5_VLProcessor"})
    with torch.device("meta"):
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
    draw = torch.Generator(device).manual_seed(_SEED)
    # Tied weights are written once, under the name of the embedding table.
    weights = {key: _drawn(key, each.shape, draw, device) for key, each in model.named_parameters()}
    head = weights["lm_head.weight" if "lm_head.weight" in weights else "model.language_model.embed_tokens.weight"]
    # Ids without a token are never generated.
    head[len(tokenizer) :] = 0.0
    head[tokenizer.all_special_ids] = 0.0
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _drawn(name: str, shape: torch.Size, draw: torch.Generator, device: torch.device) -> torch.Tensor:
    """Returns weights that keep activations in scale, in main memory."""
    if len(shape) == 1:
        is_scale = "norm" in name and name.endswith("weight")
        return torch.full(shape, 1.0 if is_scale else 0.0, dtype=torch.bfloat16)
    fan_in = shape[1] if "embed_tokens" in name else math.prod(shape[1:])
    weights = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return weights.normal_(0.0, fan_in**-0.5, generator=draw).cpu()
