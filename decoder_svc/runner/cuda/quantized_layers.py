"""Puts layers that compute with codes on a CUDA device in the place of those that a quantized model has."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder_svc.runner.cuda.device_weight import DeviceWeight, joined, tile_inputs
from lookonce.errors import ConfigurationError
from lookonce.logs import get_logger
from lookonce.model.kernels.load_progress import LoadProgress
from lookonce.model.kernels.quantized_experts import experts_of
from lookonce.model.kernels.quantized_layers import make_layers_whole
from lookonce.model.kernels.quantized_weight import QuantizedLinear, QuantizedWeight

# Largest accepted distance from the product with the whole weight, relative to its norm.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

_log = get_logger(__name__)


class DeviceLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer with a quantized weight on a CUDA device."""

    def __init__(self, weight: DeviceWeight, bias: Tensor | None, num_processors: int) -> None:
        """`num_processors` is the device's number of multiprocessors. Raises ImportError without Triton."""
        super().__init__()
        # Imported here, because a decoder without Triton serves models that have no such layer.
        self._kernels: Any = importlib.import_module("decoder_svc.runner.cuda.triton_quantized")
        self.weight_codes = weight
        self.bias = bias
        self.in_features, self.out_features = weight.num_inputs, weight.num_outputs
        self.num_processors = num_processors

    @property
    def variant(self) -> tuple[object, ...]:
        """Layers with the same variant run the same compiled kernels."""
        weight = self.weight_codes
        offsets = None if weight.offsets is None else weight.offsets.dtype
        return *weight.kind, weight.num_outputs, weight.scales.dtype, offsets, self.bias is None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, for `weight_bytes`."""
        return self.weight_codes.nbytes

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns outputs `[..., outputs]` of inputs `[..., inputs]`."""
        result: Tensor = self._kernels.linear(inputs, self.weight_codes, self.bias, self.num_processors)
        return result

    def samples(self) -> Iterator[Tensor]:
        """Yields random rows `[rows, inputs]`, so many that each kernel runs once."""
        for num_rows in self._kernels.ROW_COUNTS:
            rows = torch.randn(num_rows, self.in_features, generator=torch.Generator().manual_seed(num_rows))
            yield rows.to(self.weight_codes.codes.device, self.weight_codes.dtype)


def refuse_experts(text_model: torch.nn.Module) -> None:
    """Raises ConfigurationError if a model whose weights are to be rounded has experts, which get no codes here."""
    if any(experts_of(module) is not None for module in text_model.modules()):
        raise ConfigurationError("quantize is offered for models with experts on CPUs only; leave it out")


def install_quantized_layers(
    model: Any, device: torch.device, num_processors: int, *, is_required: bool = False
) -> None:
    """Replaces layers with codes, in place, by layers whose codes are on the device.

    Experts, and layers whose groups of inputs the kernels cannot read, get whole weights. So do all layers if a kernel
    fails on this device, unless codes are required: then ConfigurationError is raised.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, QuantizedLinear)
    ]
    reason = _replace(found, device, num_processors)
    if reason is not None:
        if is_required:
            raise ConfigurationError(f"quantize is not offered on this device: {reason}; leave it out")
        _log.warning("quantized weights are not computed with as codes", reason=reason)
        for parent, name, layer in found:
            setattr(parent, name, layer)
    make_layers_whole(model)


def _replace(
    found: Sequence[tuple[torch.nn.Module, str, QuantizedLinear]], device: torch.device, num_processors: int
) -> str | None:
    """Replaces layers; returns why a kernel cannot be used, in the middle of it."""
    progress = LoadProgress("quantized layers are copied to the device", len(found))
    check = LayerCheck()
    num_bytes = num_layers = 0
    for parent, name, layer in found:
        weight = layer.quantized_weight
        if tile_inputs(weight) is None:
            continue
        bias = None if layer.bias is None else layer.bias.to(device)
        try:
            made = DeviceLinear(DeviceWeight.of(weight, device), bias, num_processors)
            reason = check.reason(made, weight)
        except Exception as error:  # compilers and drivers raise many types
            _log.debug("a kernel failed its check", exc_info=True)
            reason = f"its kernels fail ({type(error).__name__})"
        if reason is not None:
            return reason
        setattr(parent, name, made)
        num_layers += 1
        num_bytes += made.weight_codes.nbytes
        progress.add(made.weight_codes.nbytes)
    if found:
        _log.info("quantized layers are on the device", num_layers=num_layers, mib=num_bytes >> 20)
    return None


class LayerCheck:
    """Compares products with those of whole weights, once for each variant of layers."""

    def __init__(self) -> None:
        self._passed: set[tuple[object, ...]] = set()

    def reason(self, layer: DeviceLinear, weight: QuantizedWeight | DeviceWeight) -> str | None:
        """Returns how a layer's results differ from those with its weight, or None if they do not.

        Raises what compilers and drivers raise.
        """
        if layer.variant in self._passed:
            return None
        with torch.inference_mode():
            whole = weight.dequantized().to(layer.weight_codes.codes.device)
            for rows in layer.samples():
                wanted = F.linear(rows, whole, layer.bias).float()
                difference = float((layer(rows).float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
                # Written with `not` so that NaN fails.
                if not difference <= _TOLERANCES[layer.weight_codes.dtype]:
                    return f"results for {len(rows)} rows differ by {difference:.2g}"
        self._passed.add(layer.variant)
        return None


def wrong_layer_reason(model: torch.nn.Module) -> str | None:
    """Returns how the results of any layer with codes differ from those of its weight, or None if none does."""
    check = LayerCheck()
    layers = (module for module in model.modules() if isinstance(module, DeviceLinear))
    return next(filter(None, (check.reason(layer, layer.weight_codes) for layer in layers)), None)


def joined_linears(linears: Sequence[DeviceLinear]) -> DeviceLinear:
    """Returns one layer with the outputs of all, whose weights become parts of its weight.

    They must have weights of one kind.
    """
    weight = joined([linear.weight_codes for linear in linears])
    start = 0
    for linear in linears:
        linear.weight_codes = weight.outputs(start, start + linear.out_features)
        start += linear.out_features
    return DeviceLinear(weight, joined_biases(linears, weight.codes.device, weight.dtype), linears[0].num_processors)


def joined_biases(linears: Sequence[Any], device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Returns the biases of linear layers, 0 where a layer has none; None if none has."""
    if all(linear.bias is None for linear in linears):
        return None
    zeros = [torch.zeros(linear.out_features, dtype=dtype, device=device) for linear in linears]
    return torch.cat(
        [zero if linear.bias is None else linear.bias for linear, zero in zip(linears, zeros, strict=True)]
    )


def compile_quantized_kernels(model: torch.nn.Module) -> None:
    """Runs each kernel of the model's layers once, so that none is compiled while serving."""
    for layer in {each.variant: each for each in model.modules() if isinstance(each, DeviceLinear)}.values():
        for rows in layer.samples():
            layer(rows)
