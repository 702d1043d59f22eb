"""Linear layers for CPUs with weights in oneDNN's own layout; plain PyTorch weights are reordered on every call.

Any model's `torch.nn.Linear` modules can be replaced, and a following activation can be fused. The operators are not
part of PyTorch's stable interface, so each layer is compared with the plain one when a model is loaded; the plain layer
is kept if the operators are missing or the results differ. Needs torch, so only the services import this module.

Time of plain ÷ packed on 2 × AMD EPYC (AVX512-BF16), layers of 576 … 3072, median of 15: bfloat16 1.7 … 2.4 with 1 row,
1.5 … 1.7 with 64, 1.06 … 1.2 with 576 and more; float32 1.6 … 2, 1.3 … 1.7 and 1.1 … 1.26. 2026-11-22.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

import torch
from torch.nn import functional

from lookonce.logs import get_logger

# Number of rows for which oneDNN chooses the layout. 32 was as fast as the true number from 1 to 4608 rows.
_ROWS_HINT = 32
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")
# Processor features per element type; packing pays if the processor has any of them.
_CAPABILITIES = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float32: ("avx512_f",)}
# Largest accepted difference from the plain layer on random rows, relative to the norm of its output. Both sum in
# float32.
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
_NUM_CHECKED_ROWS = 4

_log = get_logger(__name__)


class Activation(enum.Enum):
    """A fused activation, computed before outputs are rounded and written."""

    NONE = ("none", "")
    RELU = ("relu", "")
    SILU = ("swish", "")
    GELU = ("gelu", "none")
    GELU_TANH = ("gelu", "tanh")

    @property
    def function(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The activation as a PyTorch function, elementwise."""
        return _FUNCTIONS[self]


_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.NONE: lambda outputs: outputs,
    Activation.RELU: functional.relu,
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda outputs: functional.gelu(outputs, approximate="tanh"),
}


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Computes `activation(inputs @ weight.T + bias)` for inputs [..., in_features] of the weight's element type.

    Runs on the CPU, without gradients or state dict. The packed weight is a copy; the plain weight may be released.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation = Activation.NONE
    ) -> None:
        """`weight` is dense, [out_features, in_features]; `unpackable_reason` says which weights can be packed."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.activation = activation
        # Opaque tensor: it has a shape and an element type, but no values that PyTorch can read.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.bias = None if bias is None else bias.detach().clone()
        self._attribute, self._algorithm = activation.value

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns contiguous outputs [..., out_features]."""
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.weight, self.bias, self._attribute, [], self._algorithm
        )
        return outputs

    def agrees_with(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether the results for random rows agree with those of PyTorch's plain operators."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(_NUM_CHECKED_ROWS, self.in_features, generator=generator).to(weight.dtype)
        expected = self.activation.function(functional.linear(rows, weight, bias)).float()
        distance = (self(rows).float() - expected).norm()
        return bool(distance <= _TOLERANCE[weight.dtype] * expected.norm())

    def extra_repr(self) -> str:
        """Returns the text of `repr`, in the form of torch.nn.Linear."""
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}, {self.activation}"


def unpackable_reason(dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why linear layers are not packed, or None if packing is possible and pays."""
    if device.type != "cpu":
        return f"the model is on {device.type}"
    if dtype not in _CAPABILITIES:
        return f"weights of {dtype} are not packed"
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch was built without oneDNN"
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.mkldnn, name)]
    if missing:
        return f"this PyTorch has no operator mkldnn::{missing[0]}"
    ask = getattr(torch.cpu, "get_capabilities", None)
    found = {} if ask is None else ask()
    if not any(found.get(name) for name in _CAPABILITIES[dtype]):
        return f"the processor has none of {', '.join(_CAPABILITIES[dtype])}"
    return None


def packed(linear: torch.nn.Linear, activation: Activation = Activation.NONE) -> PackedLinear | None:
    """Returns a packed layer with fused `activation`, or None if packing is impossible or changes the results."""
    if unpackable_reason(linear.weight.dtype, linear.weight.device) is not None:
        return None
    with torch.inference_mode():
        layer = PackedLinear(linear.weight, linear.bias, activation)
        return layer if layer.agrees_with(linear.weight, linear.bias) else None


def pack_linears(model: torch.nn.Module, *, skip: Collection[str] = ()) -> int:
    """Replaces the model's linear layers in place; returns and logs their number, or logs why none was replaced.

    Subclasses of torch.nn.Linear and modules whose full names are in `skip` stay. Plain weights are freed one by one,
    unless something else holds them.
    """
    found = [
        (parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and f"{path}.{name}".removeprefix(".") not in skip
    ]
    if not found:
        return 0
    dtype, device = found[0][2].weight.dtype, found[0][2].weight.device
    reason = unpackable_reason(dtype, device)
    if reason is not None:
        _log.info("linear layers are not packed", num_layers=len(found), reason=reason)
        return 0
    # Keyed by id, so that the dict keeps no plain layer alive. Layers still in `found` are alive, so no id is reused.
    layers: dict[int, PackedLinear | None] = {}
    while found:
        parent, name, linear = found.pop()
        if id(linear) not in layers:
            layers[id(linear)] = packed(linear)
        if (layer := layers[id(linear)]) is not None:
            setattr(parent, name, layer)
    num_packed = sum(layer is not None for layer in layers.values())
    _log.info("linear layers packed", num_layers=num_packed, dtype=str(dtype).removeprefix("torch."))
    if num_packed < len(layers):
        reason = "they cannot be packed, or their results differ from plain ones"
        _log.warning("linear layers stay as they are", num_layers=len(layers) - num_packed, reason=reason)
    return num_packed
