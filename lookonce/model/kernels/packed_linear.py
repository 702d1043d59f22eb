"""Linear layers for CPUs with weights in oneDNN's own layout; plain PyTorch weights are reordered on every call.

The operators are not part of PyTorch's stable interface, so each layer is compared with the plain one when a model is
loaded; the plain layer is kept if the operators are missing or the results differ.

Time of plain ÷ packed on 2 × AMD EPYC (AVX512-BF16), layers of 576 … 3072, median of 15: bfloat16 1.7 … 2.4 with 1 row,
1.5 … 1.7 with 64, 1.06 … 1.2 with 576 and more; float32 1.6 … 2, 1.3 … 1.7 and 1.1 … 1.26. 2026-11-22.
"""

from __future__ import annotations

import os

import torch

from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.linear_layers import agrees_with_plain

# Number of rows for which oneDNN chooses the layout. 32 was as fast as the true number from 1 to 4608 rows.
_ROWS_HINT = 32
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")
# Processor features per element type; packing can pay if the processor has any of them, and a trial decides.
_CAPABILITIES = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float32: ("avx2", "avx512_f")}
# oneDNN's variable that takes instructions away from it, and parts of those values that leave it these features.
_LIMIT = "ONEDNN_MAX_CPU_ISA"
_SUFFICIENT = {
    torch.bfloat16: ("BF16", "FP16", "AVX10", "AMX", "ALL", "DEFAULT"),
    torch.float32: ("AVX2", "AVX512", "AVX10", "AMX", "ALL", "DEFAULT"),
}
# oneDNN's names of the activations that it can fuse, with the algorithm.
_ACTIVATIONS = {
    Activation.NONE: ("none", ""),
    Activation.RELU: ("relu", ""),
    Activation.SILU: ("swish", ""),
    Activation.GELU: ("gelu", "none"),
    Activation.GELU_TANH: ("gelu", "tanh"),
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
        self._attribute, self._algorithm = _ACTIVATIONS[activation]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns contiguous outputs [..., out_features]."""
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.weight, self.bias, self._attribute, [], self._algorithm
        )
        return outputs

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
    return _lacking(dtype)


def _lacking(dtype: torch.dtype) -> str | None:
    ask = getattr(torch.cpu, "get_capabilities", None)
    found = {} if ask is None else ask()
    wanted = ", ".join(_CAPABILITIES[dtype])
    if not any(found.get(name) for name in _CAPABILITIES[dtype]):
        return f"the processor has none of {wanted}"
    limit = os.environ.get(_LIMIT, "DEFAULT")
    if not any(part in limit.upper() for part in _SUFFICIENT[dtype]):
        return f"{_LIMIT} is {limit}, with which oneDNN uses none of {wanted}"
    return None


def packed(linear: torch.nn.Linear, activation: Activation = Activation.NONE) -> PackedLinear | None:
    """Returns a packed layer with fused `activation`, or None if packing is impossible or changes the results."""
    if activation not in _ACTIVATIONS or unpackable_reason(linear.weight.dtype, linear.weight.device) is not None:
        return None
    with torch.inference_mode():
        try:
            layer = PackedLinear(linear.weight, linear.bias, activation)
        except RuntimeError:
            # A setting keeps oneDNN from instructions that the processor has.
            return None
        return layer if agrees_with_plain(layer, linear, activation) else None
