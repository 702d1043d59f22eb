"""The weights of a mixture of experts, whole or as codes, and a module that computes with codes through PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lookonce.model.kernels.activation import Activation, activation_of
from lookonce.model.kernels.quantized_weight import Weight, quantized, whole

# Properties that transformers' decorator of experts gives to a module, with their values where our kernel computes it.
_USUAL = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_concatenated": True}
# Gates, and values beside them. Twice the largest, which some activations compute, is a number in float32.
_POWERS = 2.0 ** torch.arange(-21, 127, 3, device="cpu")
_GATE_PROBES = torch.cat([-_POWERS, torch.zeros(1, device="cpu"), _POWERS])

# The weights of an expert: those of gates and of the values that they gate [mlp, hidden], and the last [hidden, mlp].
Expert = tuple[tuple[Weight, Weight], Weight]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a layer, read one by one."""

    num_experts: int
    hidden_size: int
    mlp_size: int
    dtype: torch.dtype
    # Applied to gates.
    activation: Activation
    # Takes the number of an expert.
    read: Callable[[int], Expert]


class QuantizedExperts(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Takes the place of a module with experts. It computes through PyTorch, slowly; the kernel takes its place."""

    def __init__(self, weights: ExpertWeights, plain: Any) -> None:
        """`plain` is the module that this replaces; its weights may have been released."""
        super().__init__()
        self.weights = weights
        # In a tuple, so that its parameters are not this module's.
        self._plain = (plain,)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Takes transformers' arguments: tokens `[T, hidden]`, and numbers and weights of their experts `[T, k]`."""
        output = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            if number >= self.weights.num_experts:
                continue
            (gate, up), down = self.weights.read(number)
            tokens, places = torch.where(top_k_index == number)
            inputs = hidden_states[tokens]
            gates = self.weights.activation.function(F.linear(inputs, whole(gate)))
            gated = gates * F.linear(inputs, whole(up))
            results = F.linear(gated, whole(down)) * top_k_weights[tokens, places, None]
            output.index_add_(0, tokens, results.to(output.dtype))
        return output

    def plain(self) -> Any:
        """Returns the replaced module with whole weights."""
        (module,) = self._plain
        experts = [self.weights.read(number) for number in range(self.weights.num_experts)]
        gate_up = torch.stack([torch.cat([whole(part) for part in gate_and_up]) for gate_and_up, _ in experts])
        down = torch.stack([whole(last) for _, last in experts])
        if getattr(module, "is_transposed", False):
            gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        module.down_proj = torch.nn.Parameter(down, requires_grad=False)
        return module


def experts_of(module: Any) -> ExpertWeights | None:
    """Returns the weights of a module whose experts our kernel can compute; None for any other module.

    Such a module has parameters `gate_up_proj` [experts, 2 mlp, hidden] and `down_proj` [experts, hidden, mlp] or their
    transposes, no biases, and an activation `act_fn` that we know, as most of transformers' mixtures of experts. It
    multiplies what the activation makes of a gate by the value beside it, and neither bounds nor norms anything.
    """
    if isinstance(module, QuantizedExperts):
        return module.weights
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.ndim == down.ndim == 3):
        return None
    if {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
        return None
    activation = activation_of(module.act_fn) if isinstance(getattr(module, "act_fn", None), torch.nn.Module) else None
    if activation is None or not _has_plain_rule(module):
        return None
    if getattr(module, "is_transposed", False):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    num_experts, hidden_size, mlp_size = down.shape
    if gate_up.shape != (num_experts, 2 * mlp_size, hidden_size):
        return None

    def read(number: int) -> Expert:
        gate, up = gate_up[number].chunk(2)
        return (gate, up), down[number]

    return ExpertWeights(num_experts, hidden_size, mlp_size, down.dtype, activation, read)


def _has_plain_rule(module: Any) -> bool:
    """Whether experts compute `activation(gate) * value`, whatever the numbers are, and nothing behind the last weight.

    The values of gates are taken from the module's own function for them, over all magnitudes: a bound would show. One
    trial with random tokens would not reach it. Modules without that function say nothing about their rule.
    """
    if any(getattr(module, name, usual) != usual for name, usual in _USUAL.items()):
        return False
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:
        return False
    both = torch.cartesian_prod(_GATE_PROBES, _GATE_PROBES).T.reshape(1, -1)
    gates, values = both.chunk(2, dim=-1)
    try:
        with torch.inference_mode():
            found, plain = apply_gate(both), module.act_fn(gates) * values
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return False
    return bool(torch.equal(found, plain))


def quantized_experts(module: Any, bits: int, *, is_lazy: bool = False) -> QuantizedExperts | None:
    """Rounds the weights of all experts to 4 or 8 bits, as `quantized` does, and releases them.

    With `is_lazy`, the weights stay, and those of an expert are rounded whenever it is read. Returns None for a module
    that `experts_of` does not know, or with an odd size.
    """
    weights = experts_of(module)
    if weights is None or weights.hidden_size % 2 or weights.mlp_size % 2:
        return None

    def read(number: int) -> Expert:
        (gate, up), down = weights.read(number)
        return (quantized(whole(gate), bits), quantized(whole(up), bits)), quantized(whole(down), bits)

    if is_lazy:
        return QuantizedExperts(replace(weights, read=read), module)
    experts = [read(number) for number in range(weights.num_experts)]
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, None)
    return QuantizedExperts(replace(weights, read=experts.__getitem__), module)
