"""Builds a tiny PaliGemma 2 folder: PaliGemma with Gemma 2 text, soft caps, a window of 16 in every second layer."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests.tiny_families import paligemma, parts

NAME = "paligemma2"
SLIDING_WINDOW = 16


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder; its model type is `paligemma`, as in published folders."""
    tokenizer = paligemma.prefix_tokenizer()
    text = transformers.Gemma2Config(
        **parts.gemma_text_config(tokenizer)
        | {
            "num_hidden_layers": 4,
            "sliding_window": SLIDING_WINDOW,
            "query_pre_attn_scalar": 16,
            # Tighter than the published 50 and 30, which would have no effect with such weights.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        }
    )
    return paligemma.build_with(folder, tokenizer, text, seed)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return paligemma.load_processor(folder)
