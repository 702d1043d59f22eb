"""Mixtures of experts that multiply a token before its experts, and not their results, by the experts' shares.

Llama 4's module gives each token to all of its experts, multiplied by zero for those that the router has not chosen.
The modules here compute the chosen ones alone. They have the same parameters under the same names, and their experts
take the arguments of transformers' other mixtures, so that our kernels compute them, and codes in their place.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import use_experts_implementation
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

# The form of a mixture that never waits for the chosen numbers on the host.
_CONFIG = types.SimpleNamespace(_experts_implementation="grouped_mm")


def choose_experts(model: torch.nn.Module) -> None:
    """Replaces each such mixture in a model whose weights are not loaded yet."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, Llama4TextMoe)
    ]
    for parent, name, mixture in found:
        setattr(parent, name, _ChosenExperts(mixture))


class _ChosenExperts(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Replaces a Llama4TextMoe; takes and returns the same."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        self._num_chosen = mixture.top_k
        self.experts = _Experts(_CONFIG, mixture.experts)
        self.router = mixture.router
        self.shared_expert = mixture.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Takes `[…, hidden]`; returns the results `[tokens, hidden]` and the router's logits `[tokens, experts]`."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, logits = self.router(tokens)
        values, chosen = logits.topk(self._num_chosen, dim=1)
        shares = values.float().sigmoid().to(tokens.dtype)
        # Each pair of a token and one of its experts is a token with one expert, whose result is not multiplied.
        inputs = (tokens[:, None] * shares[..., None]).flatten(0, 1)
        results = self.experts(inputs, chosen.reshape(-1, 1), inputs.new_ones(inputs.shape[0], 1))
        return self.shared_expert(tokens) + results.view(*chosen.shape, -1).sum(dim=1), logits


@use_experts_implementation(is_transposed=True)
class _Experts(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The weights of a Llama4TextExperts, in the form of transformers' mixtures with transposed weights."""

    def __init__(self, config: Any, experts: Any) -> None:
        super().__init__()
        self.num_experts = experts.num_experts
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        self.act_fn = experts.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Takes tokens `[T, hidden]`, and numbers and weights of their experts `[T, k]`."""
        raise NotImplementedError("use_experts_implementation replaces this")
