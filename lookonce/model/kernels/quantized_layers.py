"""Quantizes the linear layers of a language model that has been loaded with whole weights, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lookonce.errors import ConfigurationError
from lookonce.logs import get_logger
from lookonce.model.kernels.load_progress import LoadProgress
from lookonce.model.kernels.quantized_experts import QuantizedExperts, experts_of, quantized_experts
from lookonce.model.kernels.quantized_weight import GROUP_INPUTS, QuantizedLinear, RoundedWeight, quantized

# Layers that choose experts are small, and a wrong choice costs more than a rounded weight. Those that mix the hidden
# states of Gemma 3n (AltUp) have a few numbers, of which each counts for all of a token's.
_KEPT_WHOLE = frozenset({"gate", "router", "altup"})

# The head reads as much as several layers, and rounding it moves every logit.
_HEAD_BITS = 8

_log = get_logger(__name__)


def quantize_linears(model: Any, text_model: Any, bits: int, *, is_lazy: bool = False) -> None:
    """Replaces linear layers and experts in place by those with weights of 4 or 8 bits, one by one.

    These are the layers of the text model, and the head of `model`, which always gets 8 bits. The embedding table and
    norms stay. With `is_lazy`, weights stay whole, and each is rounded whenever somebody takes it. Raises
    ConfigurationError for a model with experts of another kind than our kernel computes, or one that is stored
    quantized.
    """
    if has_quantized_layers(model):
        raise ConfigurationError("quantize is not offered for a folder whose weights are quantized; leave it out")
    for path, module in text_model.named_modules():
        merged = [name for name, parameter in module.named_parameters(path, recurse=False) if parameter.ndim > 2]
        of_experts = [name for name in merged if "experts" in name]
        if of_experts and experts_of(module) is None:
            raise ConfigurationError(
                f"quantize is not offered for models with such experts ({of_experts[0]}); leave it out"
            )

    def is_kept(path: str, name: str) -> bool:
        return not _KEPT_WHOLE.isdisjoint((*path.split("."), name))

    found = [
        (parent, name, bits)
        for path, parent in text_model.named_modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and child.in_features % 2 == 0 and not is_kept(path, name)
    ]
    if type(model.lm_head) is torch.nn.Linear and model.lm_head.in_features % 2 == 0:
        found.append((model, "lm_head", _HEAD_BITS))
    mixtures = [(parent, name) for parent in text_model.modules() for name, _ in parent.named_children()]
    num_bytes_before = num_bytes = num_mixtures = 0
    progress = LoadProgress("linear layers are being quantized", len(found))
    with torch.inference_mode():
        for parent, name, own_bits in found:
            linear = getattr(parent, name)
            weight = linear.weight.detach()
            bias = None if linear.bias is None else linear.bias.detach().clone()
            rounded = RoundedWeight(weight, own_bits) if is_lazy else quantized(weight, own_bits)
            setattr(parent, name, QuantizedLinear(rounded, bias))
            num_bytes_before += linear.weight.nbytes
            num_bytes += _kernel_bytes(linear.out_features, linear.in_features, own_bits)
            progress.add(linear.weight.nbytes)
        for parent, name in mixtures:
            before = sum(parameter.nbytes for parameter in getattr(parent, name).parameters(recurse=False))
            experts = quantized_experts(getattr(parent, name), bits, is_lazy=is_lazy)
            if experts is None:
                continue
            setattr(parent, name, experts)
            num_mixtures += 1
            num_bytes_before += before
            sizes = experts.weights
            hidden, mlp = sizes.hidden_size, sizes.mlp_size
            num_first = len(sizes.parts) - 1
            expert_bytes = num_first * _kernel_bytes(mlp, hidden, bits) + _kernel_bytes(hidden, mlp, bits)
            num_bytes += sizes.num_experts * expert_bytes
    _log.info(
        "linear layers are quantized",
        bits=bits, num_layers=len(found), num_mixtures=num_mixtures, mib=num_bytes >> 20,
        mib_before=num_bytes_before >> 20,
    )  # fmt: skip


def has_quantized_layers(model: torch.nn.Module) -> bool:
    """Whether weights of linear layers or experts are codes."""
    return any(isinstance(module, QuantizedLinear | QuantizedExperts) for module in model.modules())


def make_layers_whole(model: Any, remedy: str | None = None) -> None:
    """Replaces layers with codes in place by plain ones, for devices on which no kernel reads codes.

    `remedy` is logged; it tells what keeps the codes.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, QuantizedLinear | QuantizedExperts)
    ]
    num_layers = len(found)
    with torch.inference_mode():
        while found:
            parent, name, child = found.pop()
            is_linear = isinstance(child, QuantizedLinear)
            setattr(parent, name, plain_linear(child.weight, child.bias) if is_linear else child.plain())
    if num_layers:
        dtype = str(model.dtype).removeprefix("torch.")
        _log.warning(
            "quantized layers get whole weights, because no kernel reads their codes",
            num_layers=num_layers, dtype=dtype, remedy=remedy,
        )  # fmt: skip


def plain_linear(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    """Returns a linear layer with this weight `[outputs, inputs]`."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    return linear


def _kernel_bytes(num_outputs: int, num_inputs: int, bits: int) -> int:
    """Returns the bytes of codes, and of a scale and an offset in float32 for each group."""
    return num_outputs * (num_inputs * bits // 8 + 8 * -(-num_inputs // GROUP_INPUTS))
