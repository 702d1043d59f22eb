"""Quantizes the linear layers of a language model that has been loaded with whole weights."""

from __future__ import annotations

from typing import Any

import torch

from lookonce.errors import ConfigurationError
from lookonce.logs import get_logger
from lookonce.model.kernels.quantized_weight import QuantizedLinear, QuantizedWeight, quantized

# Layers that choose experts are small, and a wrong choice costs more than a rounded weight.
_ROUTERS = frozenset({"gate", "router"})

# The head reads as much as several layers, and rounding it moves every logit.
_HEAD_BITS = 8

_log = get_logger(__name__)


def quantize_linears(model: Any, text_model: Any, bits: int) -> None:
    """Replaces linear layers in place by layers with weights of 4 or 8 bits, one by one.

    These are the layers of the text model, and the head of `model`, which always gets 8 bits. The embedding table and
    norms stay. Raises ConfigurationError for a model with merged experts.
    """
    experts = [name for name, parameter in text_model.named_parameters() if "experts" in name and parameter.ndim > 2]
    if experts:
        raise ConfigurationError(f"quantize is not offered for models with experts ({experts[0]}); leave it out")
    found = [
        (parent, name, bits)
        for parent in text_model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and name not in _ROUTERS and child.in_features % 2 == 0
    ]
    if type(model.lm_head) is torch.nn.Linear and model.lm_head.in_features % 2 == 0:
        found.append((model, "lm_head", _HEAD_BITS))
    num_bytes_before = num_bytes = 0
    with torch.inference_mode():
        for parent, name, own_bits in found:
            linear = getattr(parent, name)
            weight = quantized(linear.weight, own_bits)
            bias = None if linear.bias is None else linear.bias.detach().clone()
            setattr(parent, name, QuantizedLinear(weight, bias))
            num_bytes_before += linear.weight.nbytes
            num_bytes += _kernel_bytes(weight)
    _log.info(
        "linear layers are quantized",
        bits=bits, num_layers=len(found), mib=num_bytes >> 20, mib_before=num_bytes_before >> 20,
    )  # fmt: skip


def _kernel_bytes(weight: QuantizedWeight) -> int:
    return int(weight.codes.numel() * weight.bits // 8 + weight.scales.nbytes + weight.offsets.nbytes)
