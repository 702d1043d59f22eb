"""Layers with a window are told from the configuration. Beside layers without one, they form a group of their own."""

from __future__ import annotations

import pytest
import transformers

from decoder_svc.runner.kv_cache_spec import layer_window, layers_with_window
from decoder_svc.scheduling.window import Window


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["full_attention", "sliding_attention", "sliding_attention"], {1, 2}),
        (["conv", "sliding_attention", "full_attention"], {1}),
        (["conv", "sliding_attention", "sliding_attention"], set()),
        (["sliding_attention"] * 3, set()),
    ],
)
def test_only_layers_beside_attention_to_every_token_release_what_their_window_left(
    kinds: list[str], expected: set[int]
) -> None:
    text = transformers.Lfm3Config(num_hidden_layers=3, layer_types=kinds, sliding_window=8)
    assert layers_with_window(text) == expected


@pytest.mark.parametrize(
    ("no_rope_layers", "expected"), [([1, 0, 1, 1], {0, 2, 3}), ([0] * 4, set()), ([1] * 4, set())]
)
def test_layers_with_chunks_have_a_window_too(no_rope_layers: list[int], expected: set[int]) -> None:
    text = transformers.Llama4TextConfig(
        num_hidden_layers=4, no_rope_layers=no_rope_layers, attention_chunk_size=96, layer_types=None
    )
    assert layers_with_window(text) == expected
    chunk = Window(96, is_chunked=True)
    assert [layer_window(text, layer) for layer in range(4)] == [chunk if each else None for each in no_rope_layers]


def test_a_window_that_is_not_used_is_none() -> None:
    text = transformers.Qwen2Config(num_hidden_layers=2, sliding_window=8, use_sliding_window=False)
    assert [layer_window(text, layer) for layer in range(2)] == [None, None]
