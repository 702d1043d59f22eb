"""Replaces a model's plain linear layers by those of a kernel, each after a comparison with the plain one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from lookonce.logs import get_logger
from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.load_progress import LoadProgress
from lookonce.model.kernels.quantized_weight import QuantizedLinear

# Makes a faster layer that computes the same, with a fused activation; None if it cannot.
LayerMaker = Callable[[torch.nn.Linear | QuantizedLinear, Activation], torch.nn.Module | None]

# Largest accepted difference from the plain layer on random rows, relative to the norm of its output. Both sum in
# float32.
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
_NUM_CHECKED_ROWS = 4

_log = get_logger(__name__)


def agrees_with_plain(
    layer: torch.nn.Module, linear: torch.nn.Linear | QuantizedLinear, activation: Activation
) -> bool:
    """Whether a layer's results for random rows agree with those of PyTorch's plain operators."""
    generator = torch.Generator().manual_seed(0)
    weight = linear.weight
    rows = torch.randn(_NUM_CHECKED_ROWS, linear.in_features, generator=generator).to(weight.dtype)
    expected = activation.function(functional.linear(rows, weight, linear.bias)).float()
    distance = (layer(rows).float() - expected).norm()
    return bool(distance <= _TOLERANCE[weight.dtype] * expected.norm())


def replace_linears(model: torch.nn.Module, make: LayerMaker) -> int:
    """Replaces the model's linear layers in place; returns and logs their number.

    Subclasses of torch.nn.Linear stay. Plain weights are freed one by one, unless something else holds them. Raises
    what `make` raises.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in (torch.nn.Linear, QuantizedLinear)
    ]
    # Keyed by id, so that the dict keeps no plain layer alive. Layers still in `found` are alive, so no id is reused.
    layers: dict[int, torch.nn.Module | None] = {}
    progress = LoadProgress(
        "linear layers are copied into the kernels' layout", len({id(layer) for *_, layer in found})
    )
    while found:
        parent, name, linear = found.pop()
        if id(linear) not in layers:
            layers[id(linear)] = made = make(linear, Activation.NONE)
            progress.add(getattr(made, "nbytes", 0))
        if (layer := layers[id(linear)]) is not None:
            setattr(parent, name, layer)
    num_replaced = sum(layer is not None for layer in layers.values())
    if num_replaced < len(layers):
        reason = "the kernel does not support them, or its results differ from PyTorch's"
        _log.warning("linear layers stay as they are", num_layers=len(layers) - num_replaced, reason=reason)
    return num_replaced
