"""The weights of a mixture of experts, whole or as codes, and a module that computes with codes through PyTorch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lookonce.model.kernels.activation import Activation, activation_of
from lookonce.model.kernels.quantized_weight import Weight, quantized, whole

logger = logging.getLogger(__name__)

# The weights of an expert: those of gates and of the values that they gate, each [mlp, hidden], or of values alone; and
# those of the last product [hidden, mlp].
Expert = tuple[tuple[Weight, ...], Weight]

# Parameters of modules whose experts have gates, and of those whose experts have none.
_FIRST = {True: "gate_up_proj", False: "up_proj"}
_LAST = "down_proj"

# A module is compared to plain experts with tokens of these sizes: the least finds an addition, and the largest reaches
# the bounds of bounded gates.
_TRIED_SIZES = (0.1, 1.0, 10.0, 100.0, 1000.0)
# The number of experts that compute them, and the units of each.
_TRIED_EXPERTS, _TRIED_UNITS = 4, 16
# Largest accepted difference of the results of such a token, relative to their norm.
_TOLERANCE = 1e-4
# Properties that transformers' decorator of experts gives to a module, with their values where our kernel computes it.
_USUAL = {"has_bias": False, "has_post_expert_norm": False, "is_concatenated": True}
# Gates, and values beside them. Twice the largest, which some activations compute, is a number in float32.
_POWERS = 2.0 ** torch.arange(-21, 127, 3, device="cpu")
_GATE_PROBES = torch.cat([-_POWERS, torch.zeros(1, device="cpu"), _POWERS])


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a layer, read one by one."""

    num_experts: int
    hidden_size: int
    mlp_size: int
    dtype: torch.dtype
    # Applied to gates, or to all values where there are no gates.
    activation: Activation
    is_gated: bool
    # Takes the number of an expert.
    read: Callable[[int], Expert]

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of an expert's linear layers, in the order of its weights."""
        return ("gate_proj", "up_proj", "down_proj") if self.is_gated else ("up_proj", "down_proj")


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
            tokens, places = torch.where(top_k_index == number)
            inputs = hidden_states[tokens]
            (first, *gated), last = self.weights.read(number)
            units = self.weights.activation.function(F.linear(inputs, whole(first)))
            for part in gated:
                units = units * F.linear(inputs, whole(part))
            results = F.linear(units, whole(last)) * top_k_weights[tokens, places, None]
            output.index_add_(0, tokens, results.to(output.dtype))
        return output

    def plain(self) -> Any:
        """Returns the replaced module with whole weights."""
        (module,) = self._plain
        experts = [self.weights.read(number) for number in range(self.weights.num_experts)]
        first = torch.stack([torch.cat([whole(part) for part in parts]) for parts, _ in experts])
        last = torch.stack([whole(part) for _, part in experts])
        _set_weights(module, first, last, is_gated=self.weights.is_gated)
        return module


def experts_of(module: Any) -> ExpertWeights | None:
    """Returns the weights of a module whose experts our kernel can compute; None for any other module.

    Such a module has parameters `gate_up_proj` [experts, 2 mlp, hidden], or `up_proj` [experts, mlp, hidden], and
    `down_proj` [experts, hidden, mlp] or their transposes, no biases, and an activation `act_fn` that we know, as most
    of transformers' mixtures of experts. It multiplies what the activation makes of a gate by the value beside it, and
    neither bounds nor norms anything. With random weights, its results are those of such experts.
    """
    if isinstance(module, QuantizedExperts):
        return module.weights
    weights = _weights(module)
    return weights if weights is not None and _computes_plain_experts(module, weights) else None


def _weights(module: Any) -> ExpertWeights | None:
    """Returns the weights of a module with such parameters and activation, whatever it computes."""
    names = {name for name, _ in module.named_parameters()}
    is_gated = _FIRST[True] in names
    if names != {_FIRST[is_gated], _LAST}:
        return None
    first, last = (getattr(module, name, None) for name in (_FIRST[is_gated], _LAST))
    if not (isinstance(first, Tensor) and isinstance(last, Tensor) and first.ndim == last.ndim == 3):
        return None
    activation = activation_of(module.act_fn) if isinstance(getattr(module, "act_fn", None), torch.nn.Module) else None
    if activation is None or not _has_plain_rule(module, is_gated=is_gated):
        return None
    if getattr(module, "is_transposed", False):
        first, last = first.transpose(1, 2), last.transpose(1, 2)
    num_experts, hidden_size, mlp_size = last.shape
    num_parts = 2 if is_gated else 1
    if first.shape != (num_experts, num_parts * mlp_size, hidden_size):
        return None

    def read(number: int) -> Expert:
        return first[number].chunk(num_parts), last[number]

    return ExpertWeights(num_experts, hidden_size, mlp_size, last.dtype, activation, is_gated, read)


def release_weights(module: Any) -> None:
    """Releases the weights of a module that `experts_of` knows."""
    for name in [name for name, _ in module.named_parameters()]:
        setattr(module, name, None)


def _computes_plain_experts(module: Any, weights: ExpertWeights) -> bool:
    """Whether a module computes what the kernel computes, and not normed results or bounded gates, for example.

    Its own weights may not have been loaded. It computes with random ones here, of fewer and smaller experts.
    """
    num_experts, hidden_size = weights.num_experts, weights.hidden_size
    tried = copy.copy(module)
    if getattr(module, "num_experts", None) == num_experts:
        tried.num_experts = num_experts = min(num_experts, _TRIED_EXPERTS)
    # Models may be constructed on other devices and in other types, which tensors get by default then.
    with torch.device("cpu"), torch.inference_mode():
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32)

        first = random(num_experts, (len(weights.parts) - 1) * _TRIED_UNITS, hidden_size) * hidden_size**-0.5
        last = random(num_experts, hidden_size, _TRIED_UNITS)
        _set_weights(tried, first, last, is_gated=weights.is_gated)
        plain = _weights(tried)
        assert plain is not None, "a module with the same parameters"
        tokens = random(len(_TRIED_SIZES), hidden_size) * torch.tensor(_TRIED_SIZES, dtype=torch.float32)[:, None]
        num_chosen = min(2, num_experts)
        chosen = (torch.arange(num_chosen) + torch.arange(len(tokens))[:, None]) % num_experts
        shares = random(len(tokens), num_chosen).abs()
        wanted = QuantizedExperts(plain, tried)(tokens, chosen, shares)
        try:
            found = tried(tokens, chosen, shares)
        except Exception:  # modules of other kinds raise many types
            logger.debug("a module of experts failed with random tokens", exc_info=True)
            return False
        if not isinstance(found, Tensor) or found.shape != wanted.shape:
            return False
        difference = float(((found.float() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
    # Written with `not` so that NaN fails.
    if not difference <= _TOLERANCE:
        name = type(module).__name__
        logger.warning("%s stay as they are: results differ from those of plain experts by %.2g", name, difference)
        return False
    return True


def _set_weights(module: Any, first: Tensor, last: Tensor, *, is_gated: bool) -> None:
    """Sets a module's parameters to weights [experts, outputs, inputs]."""
    parameters = {}
    for name, weight in ((_FIRST[is_gated], first), (_LAST, last)):
        turned = weight.transpose(1, 2).contiguous() if getattr(module, "is_transposed", False) else weight
        parameters[name] = torch.nn.Parameter(turned, requires_grad=False)
    # A dictionary of its own, which a copy of a module shares with it otherwise. Registered parameters would be empty
    # while a model is constructed.
    module._parameters = parameters


def _has_plain_rule(module: Any, *, is_gated: bool) -> bool:
    """Whether experts compute `activation(gate) * value`, whatever the numbers are, and nothing behind the last weight.

    The values of gates are taken from the module's own function for them, over all magnitudes: a bound would show. One
    trial with random tokens would not reach it. Modules without that function say nothing about their rule.
    """
    if any(getattr(module, name, usual) != usual for name, usual in (_USUAL | {"has_gate": is_gated}).items()):
        return False
    if not is_gated:
        return True
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
    # Some activations of the largest gates are infinite, and NaN where the value beside them is 0.
    return found.shape == plain.shape and bool(((found == plain) | (found.isnan() & plain.isnan())).all())


def quantized_experts(module: Any, bits: int, *, is_lazy: bool = False) -> QuantizedExperts | None:
    """Rounds the weights of all experts to 4 or 8 bits, as `quantized` does, and releases them.

    With `is_lazy`, the weights stay, and those of an expert are rounded whenever it is read. Returns None for a module
    that `experts_of` does not know, or with an odd size.
    """
    weights = experts_of(module)
    if weights is None or weights.hidden_size % 2 or weights.mlp_size % 2:
        return None

    def read(number: int) -> Expert:
        first, last = weights.read(number)
        return tuple(quantized(whole(part), bits) for part in first), quantized(whole(last), bits)

    if is_lazy:
        return QuantizedExperts(replace(weights, read=read), module)
    experts = [read(number) for number in range(weights.num_experts)]
    release_weights(module)
    return QuantizedExperts(replace(weights, read=experts.__getitem__), module)
