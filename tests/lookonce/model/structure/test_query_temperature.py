"""Queries are multiplied by the factors that transformers computes, but by their positions, wherever they stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextDecoderLayer, Llama4TextRotaryEmbedding

from lookonce.model.structure.query_temperature import QueryTemperature, query_temperature, tune_by_position

CONFIG = transformers.Llama4TextConfig(
    hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size_mlp=32,
    intermediate_size=32, num_hidden_layers=2, no_rope_layers=[0, 1], moe_layers=[], floor_scale=10, attn_scale=0.5,
)  # fmt: skip


def layers() -> torch.nn.ModuleList:
    """Returns a layer without rotary positions, which is tuned, and one with them, with equal weights in each call."""
    torch.manual_seed(0)
    return torch.nn.ModuleList([Llama4TextDecoderLayer(CONFIG, index) for index in range(2)]).eval()


def queries_of(layer: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the queries `[1, heads, num_tokens, head_dim]` that a layer's attention would use."""
    found: list[torch.Tensor] = []

    def note(
        module: Any, query: torch.Tensor, _key: Any, value: torch.Tensor, *_: Any,
        token_positions: torch.Tensor | None = None, **__: Any,
    ) -> Any:  # fmt: skip
        temperature = query_temperature(module)
        found.append(query if temperature is None else temperature(query, token_positions))
        return value.repeat_interleave(2, dim=1).transpose(1, 2), None

    rotary = Llama4TextRotaryEmbedding(CONFIG)(hidden, positions)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "notes", note)
        patch.setattr(CONFIG, "_attn_implementation", "notes")
        layer(hidden, position_ids=positions, position_embeddings=rotary)
    (queries,) = found
    return queries


def test_queries_of_one_sequence_are_those_of_transformers() -> None:
    hidden, positions = torch.randn(1, 45, 64, generator=torch.Generator().manual_seed(1)), torch.arange(45)[None]
    plain, tuned = layers(), layers()
    assert tune_by_position(tuned) == 1
    assert [query_temperature(layer.self_attn) is not None for layer in tuned] == [True, False]
    for one, other in zip(plain, tuned, strict=True):
        assert torch.equal(queries_of(one, hidden, positions), queries_of(other, hidden, positions))


def test_a_token_has_the_factor_of_its_position_wherever_it_stands_in_the_batch() -> None:
    hidden, positions = torch.randn(1, 45, 64, generator=torch.Generator().manual_seed(2)), torch.arange(45)[None]
    tuned = layers()
    tune_by_position(tuned)
    expected = queries_of(tuned[0], hidden, positions)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(queries_of(tuned[0], hidden[:, order], positions[:, order]), expected[:, :, order])


def test_factors_begin_behind_floor_scale_and_grow() -> None:
    positions = torch.arange(40)[None]
    factors = QueryTemperature(0.5, 10)(torch.ones(1, 1, 40, 1), positions)[0, 0, :, 0]
    assert (factors[:9] == 1).all()
    assert (factors[9:] > 1).all()
    assert len(factors.unique()) == 5


def test_layers_without_tuning_stay_as_they_are() -> None:
    config = transformers.Llama4TextConfig(**{**CONFIG.to_dict(), "attn_temperature_tuning": False})
    plain = torch.nn.ModuleList([Llama4TextDecoderLayer(config, 0)])
    assert tune_by_position(plain) == 0
    assert query_temperature(plain[0].self_attn) is None
