"""A tiny Gemma 4 of the larger kind: rows of an image see each other in layers with a window, keys serve as values.

Each layer has four experts beside its dense part. Layers without a window have one key head, the others two.
"""

from __future__ import annotations

import pathlib

from tests import tiny_models
from tests.tiny_families import gemma4

NAME = "gemma4_moe"

load_processor = gemma4.load_processor


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    # A full layer in the middle, where the sight of an image's rows changes answers. With more layers, rounding to
    # bfloat16 would change which experts tokens go to.
    types = ["sliding_attention", "full_attention"] * 2
    text = {
        "num_hidden_layers": len(types),
        "layer_types": types,
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": tiny_models.HIDDEN_SIZE,
    }
    return gemma4.build_with(folder, seed, text, {"standardize": True}, None)
