"""Linear layers by our kernel: weights in panels of 32 outputs, as native/linear.h reads them.

One layout serves every number of tokens, so one copy of a weight is enough. Each output is one sum in a fixed order, so
a token's numbers do not depend on the batch. Time of oneDNN's packed layers ÷ ours over all layers of small-llava on
2 × AMD EPYC (AVX512-BF16), 2026-11-22: bfloat16 1.6 / 1.7 / 1.3 / 1.2 / 1.1 with 1 / 8 / 32 / 64 / 512 tokens, float32
1.9 / 1.5 / 1.2 / 1.0 / 1.1.
"""

from __future__ import annotations

import ctypes
import pathlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.linear_layers import agrees_with_plain
from lookonce.model.kernels.native_library import load_library

SOURCES = pathlib.Path(__file__).with_name("native")
PANEL_OUTPUTS = 32


class Linear(ctypes.Structure):
    """A linear layer with packed weights; the layout of `Linear` in native/linear.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weights of one linear layer in the kernel's layout."""

    num_inputs: int
    num_outputs: int
    dtype: torch.dtype
    # [panels, inputs in 32-bit words, 32], int32.
    panels: Tensor
    # float32 [outputs rounded up to 32].
    bias: Tensor | None

    def struct(self) -> Linear:
        """Returns the kernel's argument. It points into these weights, which must stay alive."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Linear(self.panels.data_ptr(), bias, self.num_inputs, self.num_outputs)


def packable(weight: Tensor) -> bool:
    """Whether the kernel supports such a weight `[outputs, inputs]`."""
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.shape[1] * weight.itemsize % 4 == 0


def packed(weight: Tensor, bias: Tensor | None = None) -> PackedWeights:
    """Copies a weight `[outputs, inputs]` into the kernel's layout."""
    num_outputs, num_inputs = weight.shape
    missing = -num_outputs % PANEL_OUTPUTS
    whole = F.pad(weight, (0, 0, 0, missing)).contiguous()
    panels = whole.view(torch.int32).unflatten(0, (-1, PANEL_OUTPUTS)).transpose(1, 2).contiguous()
    wide_bias = None if bias is None else F.pad(bias.float(), (0, missing)).contiguous()
    return PackedWeights(num_inputs, num_outputs, weight.dtype, panels, wide_bias)


class NativeLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Computes `activation(inputs @ weight.T + bias)` for inputs `[..., inputs]` of the weights' type."""

    def __init__(
        self,
        weights: PackedWeights,
        num_threads: int,
        output_dtype: torch.dtype | None = None,
        activation: Activation = Activation.NONE,
    ) -> None:
        """`output_dtype` is the weights' type (None) or float32. Raises NativeLibraryError."""
        super().__init__()
        self.in_features, self.out_features = weights.num_inputs, weights.num_outputs
        self._weights, self._struct, self._num_threads = weights, weights.struct(), num_threads
        self._output_dtype = output_dtype or weights.dtype
        self.activation = activation
        types = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys((weights.dtype, self._output_dtype))]
        self._function = load_library(SOURCES).function("lookonce_linear_" + "_".join(types))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the layer's outputs, `[..., outputs]`, contiguous."""
        assert inputs.dtype == self._weights.dtype, f"inputs are {inputs.dtype}, weights {self._weights.dtype}"
        inputs = inputs.contiguous()
        output = torch.empty((*inputs.shape[:-1], self.out_features), dtype=self._output_dtype)
        self._function(
            ctypes.byref(self._struct),
            ctypes.c_void_p(inputs.data_ptr()),
            ctypes.c_int64(inputs.numel() // self.in_features),
            ctypes.c_void_p(output.data_ptr()),
            ctypes.c_int64(self.activation.value),
            ctypes.c_int64(self._num_threads),
        )
        return output

    @property
    def weight(self) -> Tensor:
        """An empty tensor of the weights' type, which some modules of transformers read from their layers."""
        return torch.empty(0, dtype=self._weights.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weights take."""
        return int(self._weights.panels.nbytes)


def native_linear(
    linear: torch.nn.Linear, activation: Activation = Activation.NONE, *, num_threads: int
) -> NativeLinear | None:
    """Returns a layer by our kernel with fused `activation`, or None if the kernel cannot compute it.

    Raises NativeLibraryError.
    """
    if not packable(linear.weight):
        return None
    with torch.inference_mode():
        layer = NativeLinear(packed(linear.weight, linear.bias), num_threads, activation=activation)
        return layer if agrees_with_plain(layer, linear, activation) else None
