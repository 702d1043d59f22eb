"""MLPs of vision towers with inner sizes that suit the matrix units of GPUs.

cuBLAS uses its fast kernels only for rows that begin at multiples of 16 bytes. The tower of Qwen2.5-VL has an inner
size of 3,420, and its rows of bfloat16 take 6,840 bytes. Zero weights and biases that are added change no result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from encoder_svc.vision.module_trial import MLP_SCALES, random_rows, replacement_problem
from lookonce.model.kernels.activation import Activation, activation_of

_MULTIPLE = 64
_ALIGNED_BYTES = 16
_GATED = ("gate_proj", "up_proj", "down_proj")

# Returns SiLU(gate) · up of `[num_tokens, 2 · size]`, gates first.
Gated = Callable[[Tensor], Tensor]


class GatedMlp(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """down(activation(gate(x)) · up(x)), with one product for gate and up, and a padded inner size."""

    def __init__(self, mlp: Any, activation: torch.nn.Module, gated: Gated | None) -> None:
        """Copies the weights of `mlp`. `gated` is a kernel for SiLU, which `activation` must be then."""
        super().__init__()
        size = padded_size(mlp.down_proj.in_features)
        self.gate_up = _linear_of([_with_outputs(each, size) for each in (mlp.gate_proj, mlp.up_proj)])
        self.down = _with_inputs(mlp.down_proj, size)
        self.activation = activation
        self._gated = gated

    def forward(self, hidden_state: Tensor) -> Tensor:
        """Takes and returns `[…, hidden_size]`."""
        merged = self.gate_up(hidden_state)
        if self._gated is not None:
            inner = self._gated(merged.view(-1, merged.shape[-1])).view(*merged.shape[:-1], -1)
        else:
            gate, up = merged.chunk(2, dim=-1)
            inner = self.activation(gate) * up
        output: Tensor = self.down(inner)
        return output


def padded_size(size: int) -> int:
    """Returns the inner size with padding."""
    return -(-size // _MULTIPLE) * _MULTIPLE


def is_gated_mlp(module: torch.nn.Module) -> bool:
    """Whether a module's parts are those of a gated MLP; the trial decides whether it computes one."""
    children = dict(module.named_children())
    if not children.keys() >= set(_GATED) or len(children) != len(_GATED) + 1:
        return False
    gate, up, down = linears = [children[name] for name in _GATED]
    return (
        all(type(linear) is torch.nn.Linear for linear in linears)
        and gate.out_features == up.out_features == down.in_features
        and (gate.bias is None) == (up.bias is None)
    )


def replace_gated_mlp(parent: torch.nn.Module, name: str, gated: Gated | None) -> str | None:
    """Puts a `GatedMlp` in the place of a gated MLP. Returns the reason against it, or None."""
    mlp = getattr(parent, name)
    activation = next(child for other, child in mlp.named_children() if other not in _GATED)
    is_silu = activation_of(activation) is Activation.SILU
    faster = GatedMlp(mlp, activation, gated if is_silu else None).eval()
    rows = random_rows(mlp.gate_proj.in_features, mlp.gate_proj.weight)
    reason = replacement_problem(mlp, faster, rows, MLP_SCALES)
    if reason is None:
        setattr(parent, name, faster)
    return reason


def is_unaligned_mlp(module: torch.nn.Module) -> bool:
    """Whether a module's parts are two linear layers and an activation, with an inner size that is not aligned."""
    return bool(_unaligned_orders(module))


def pad_mlp(mlp: torch.nn.Module) -> str | None:
    """Pads the two linear layers of an MLP in place. Returns the reason against it, or None."""
    reason: str | None = None
    for (first_name, first), (second_name, second) in _unaligned_orders(mlp):
        rows = random_rows(first.in_features, first.weight)
        size = padded_size(first.out_features)
        padded = copy.copy(mlp)
        padded._modules = dict(mlp._modules)
        setattr(padded, first_name, _linear_of([_with_outputs(first, size)]))
        setattr(padded, second_name, _with_inputs(second, size))
        reason = replacement_problem(mlp, padded, rows, MLP_SCALES)
        if reason is None:
            setattr(mlp, first_name, getattr(padded, first_name))
            setattr(mlp, second_name, getattr(padded, second_name))
            break
    return reason


def _unaligned_orders(module: torch.nn.Module) -> list[list[tuple[str, Any]]]:
    """Returns names and layers of an MLP without a gate, in each order that their sizes and alignment allow.

    The order of registration comes first, but it need not be that of the forward pass.
    """
    children = list(module.named_children())
    linears = [(name, child) for name, child in children if type(child) is torch.nn.Linear]
    others = [child for _, child in children if type(child) is not torch.nn.Linear]
    # Attention has two linear layers as well, and no activation.
    if len(linears) != 2 or not others or any(next(child.parameters(), None) is not None for child in others):
        return []
    return [
        [first, second]
        for first, second in (linears, linears[::-1])
        if first[1].out_features == second[1].in_features
        and first[1].out_features * first[1].weight.element_size() % _ALIGNED_BYTES
    ]


def _with_outputs(linear: Any, size: int) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias of a layer with more outputs, which are 0."""
    added = size - linear.out_features
    bias = None if linear.bias is None else functional.pad(linear.bias, (0, added))
    return functional.pad(linear.weight, (0, 0, 0, added)), bias


def _with_inputs(linear: Any, size: int) -> torch.nn.Linear:
    """Returns a layer with more inputs, which it ignores."""
    return _linear_of([(functional.pad(linear.weight, (0, size - linear.in_features)), linear.bias)])


def _linear_of(parts: Sequence[tuple[Tensor, Tensor | None]]) -> torch.nn.Linear:
    """Returns one layer with the outputs of several, given as weights and biases."""
    weight = torch.cat([weight for weight, _ in parts])
    biases = [bias for _, bias in parts if bias is not None]
    # The layer's own weights are replaced, so they take no memory.
    linear = torch.nn.Linear(weight.shape[1], len(weight), bias=bool(biases), device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if biases:
        linear.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
    return linear
