"""Layers with a window form a group of their own, unless the model has recurrent layers."""

from __future__ import annotations

import pytest
import transformers

from decoder_svc.runner.kv_cache_spec import layers_with_window


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["full_attention", "sliding_attention", "sliding_attention"], {1, 2}),
        (["conv", "sliding_attention", "full_attention"], set()),
        (["sliding_attention"] * 3, set()),
    ],
)
def test_only_layers_beside_attention_to_every_token_release_what_their_window_left(
    kinds: list[str], expected: set[int]
) -> None:
    text = transformers.Lfm3Config(num_hidden_layers=3, layer_types=kinds, sliding_window=8)
    assert layers_with_window(text) == expected
