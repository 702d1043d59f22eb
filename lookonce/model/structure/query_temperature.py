"""Queries that are multiplied by a factor of their position (temperature tuning, arXiv:2501.19399; Llama 4).

transformers counts positions from the first token of a batch, where the decoder puts many sequences one after another.
Here, the factor comes from the positions that the text model is called with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class QueryTemperature(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The factor of queries: 1 + attn_scale · log(1 + ⌊(position + 1) / floor_scale⌋)."""

    def __init__(self, attn_scale: float, floor_scale: float) -> None:
        super().__init__()
        self._attn_scale, self._floor_scale = attn_scale, floor_scale

    def forward(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Multiplies queries `[1, heads, num_tokens, head_dim]`, given positions `[1, num_tokens]`."""
        # The steps of transformers, in their order: results are equal to the last bit.
        steps = torch.floor((positions.float() + 1.0) / self._floor_scale)
        factors = torch.log1p(steps) * self._attn_scale + 1.0
        return (queries * factors[:, None, :, None]).to(queries.dtype)


def tune_by_position(text_model: torch.nn.Module) -> int:
    """Takes temperature tuning out of a loaded text model's attention modules; returns the number of such layers.

    Their attention is then called with `token_positions`; see `query_temperature`.
    """
    num_layers = 0
    for layer in text_model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if not getattr(attention, "attn_temperature_tuning", False):
            continue
        attention.attn_temperature_tuning = False
        # Layers with rotary positions are not tuned.
        if not attention.use_rope:
            attention.query_temperature = QueryTemperature(attention.attn_scale, attention.floor_scale)
            layer.register_forward_pre_hook(_pass_positions, with_kwargs=True)
            num_layers += 1
    return num_layers


def query_temperature(module: Any) -> QueryTemperature | None:
    """Returns the factor of an attention module's queries; None for a module without one."""
    found = getattr(module, "query_temperature", None)
    return found if isinstance(found, QueryTemperature) else None


def _pass_positions(_layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Has a layer give its positions to its attention, which passes on arguments that it does not know."""
    return arguments, named | {"token_positions": named["position_ids"]}
