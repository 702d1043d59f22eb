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
from lookonce.model.kernels.quantized_weight import (
    CodeForm,
    QuantizedLinear,
    QuantizedWeight,
    Weight,
    dtype_of,
    padded,
    weight_of,
)

SOURCES = pathlib.Path(__file__).with_name("native")
PANEL_OUTPUTS = 32
# The kernel has no memory for the sums of smaller blocks, and none for the words of larger ones.
_LEAST_BLOCK_INPUTS, _MOST_BLOCK_INPUTS = 16, 128
# Inputs in a word where the kernel multiplies bytes.
_BYTE_INPUTS = 4


class Linear(ctypes.Structure):
    """A linear layer with packed weights; the layout of `Linear` in native/layer.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("group_inputs", ctypes.c_int64),
        ("code_form", ctypes.c_int64),
        ("word_inputs", ctypes.c_int64),
        ("block_inputs", ctypes.c_int64),
        ("factor_bytes", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class _Codes:
    """Quantized weights in the kernel's layout, as native/layer.h describes it."""

    # uint8.
    codes: Tensor
    # [panels, groups, 32], bfloat16 if it holds all of them exactly, otherwise float32.
    scales: Tensor
    # The same type; None: all are 0.
    offsets: Tensor | None
    group_inputs: int
    form: CodeForm
    # Inputs in a word of codes of one output.
    word_inputs: int
    # Inputs whose products are summed before the sum is scaled.
    block_inputs: int


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weights of one linear layer in the kernel's layout."""

    num_inputs: int
    num_outputs: int
    dtype: torch.dtype
    # [panels, inputs in 32-bit words, 32], int32; None: the weights are quantized.
    panels: Tensor | None
    codes: _Codes | None
    # float32 [outputs rounded up to 32].
    bias: Tensor | None

    def struct(self) -> Linear:
        """Returns the kernel's argument. It points into these weights, which must stay alive."""
        bias = None if self.bias is None else self.bias.data_ptr()
        panels = None if self.panels is None else self.panels.data_ptr()
        struct = Linear(panels, bias, self.num_inputs, self.num_outputs)
        if self.codes is not None:
            struct.codes = self.codes.codes.data_ptr()
            struct.scales, struct.factor_bytes = self.codes.scales.data_ptr(), self.codes.scales.itemsize
            struct.offsets = None if self.codes.offsets is None else self.codes.offsets.data_ptr()
            struct.group_inputs, struct.code_form = self.codes.group_inputs, self.codes.form
            struct.word_inputs, struct.block_inputs = self.codes.word_inputs, self.codes.block_inputs
        return struct

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, which every step reads."""
        if self.codes is not None:
            parts = (self.codes.codes, self.codes.scales, self.codes.offsets)
            return sum(part.nbytes for part in parts if part is not None)
        assert self.panels is not None, "weights are panels or codes"
        return int(self.panels.nbytes)


def packable(linear: torch.nn.Linear | QuantizedLinear) -> bool:
    """Whether the kernel supports a layer's weight."""
    dtype = dtype_of(linear)
    return dtype in (torch.float32, torch.bfloat16) and linear.in_features * dtype.itemsize % 4 == 0


def packed(weight: Weight, bias: Tensor | None = None) -> PackedWeights:
    """Copies a weight `[outputs, inputs]` into the kernel's layout.

    Raises ValueError for codes in several groups that no blocks of 16 to 128 inputs divide, such as smaller ones.
    """
    num_outputs, num_inputs = weight.shape
    missing = -num_outputs % PANEL_OUTPUTS
    rounded_up = padded(weight, missing)
    panels, codes = None, None
    if isinstance(rounded_up, QuantizedWeight):
        codes = _packed_codes(rounded_up)
    else:
        panels = (
            rounded_up.contiguous().view(torch.int32).unflatten(0, (-1, PANEL_OUTPUTS)).transpose(1, 2).contiguous()
        )
    wide_bias = None if bias is None else F.pad(bias.float(), (0, missing)).contiguous()
    return PackedWeights(num_inputs, num_outputs, weight.dtype, panels, codes, wide_bias)


def _packed_codes(weight: QuantizedWeight) -> _Codes:
    word_inputs = _word_inputs(weight)
    block_inputs = _block_inputs(weight, word_inputs)
    if block_inputs < min(_LEAST_BLOCK_INPUTS, weight.shape[1]):
        raise ValueError(f"groups of {weight.group_inputs} inputs have no parts of {_LEAST_BLOCK_INPUTS} to 128 inputs")
    # [panels, inputs in words, 32 outputs × inputs of a word]
    codes = F.pad(weight.codes, (0, -weight.shape[1] % word_inputs))
    codes = codes.unflatten(1, (-1, word_inputs)).unflatten(0, (-1, PANEL_OUTPUTS)).transpose(1, 2).flatten(2)
    codes = codes.contiguous().view(torch.uint8)
    if word_inputs == _BYTE_INPUTS and weight.form is CodeForm.INT8:
        codes ^= 0x80
    if weight.form is CodeForm.INT4:
        low, high = codes.chunk(2, dim=2)
        codes = (low | high << 4).contiguous()
    factors = torch.stack((weight.scales.float(), weight.offsets.float()))
    narrow = factors.bfloat16()
    if torch.equal(narrow.float(), factors):
        factors = narrow
    scales, offsets = (part.unflatten(0, (-1, PANEL_OUTPUTS)).transpose(1, 2).contiguous() for part in factors)
    offsets = offsets if bool(offsets.any()) else None
    return _Codes(codes, scales, offsets, weight.group_inputs, weight.form, word_inputs, block_inputs)


def _block_inputs(weight: QuantizedWeight, word_inputs: int) -> int:
    """Returns the inputs of a block: as many as fit into one group, which they divide if there are several groups."""
    group = weight.group_inputs
    if group >= weight.shape[1]:
        return min(group, _MOST_BLOCK_INPUTS)
    step = max(2, word_inputs)
    sizes = range(min(group, _MOST_BLOCK_INPUTS) // step * step, 0, -step)
    return next((size for size in sizes if group % size == 0), 0)


def _word_inputs(weight: QuantizedWeight) -> int:
    """Returns how many inputs of an output lie side by side: four where the kernel multiplies bytes."""
    per_word = int(4 // weight.dtype.itemsize)
    has_bytes = weight.form is not CodeForm.FLOAT8 and weight.dtype is torch.bfloat16
    # A word belongs to one group.
    is_whole = weight.group_inputs % _BYTE_INPUTS == 0 or weight.group_inputs >= weight.shape[1]
    if not has_bytes or not is_whole:
        return per_word
    most = ctypes.c_int64()
    load_library(SOURCES).function("lookonce_most_word_inputs")(ctypes.byref(most))
    return max(per_word, most.value)


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
        self.weights = weights
        self._struct, self._num_threads = weights.struct(), num_threads
        self._output_dtype = output_dtype or weights.dtype
        self.activation = activation
        types = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys((weights.dtype, self._output_dtype))]
        self._function = load_library(SOURCES).function("lookonce_linear_" + "_".join(types))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the layer's outputs, `[..., outputs]`, contiguous."""
        assert inputs.dtype == self.weights.dtype, f"inputs are {inputs.dtype}, weights {self.weights.dtype}"
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
        return torch.empty(0, dtype=self.weights.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weights take."""
        return self.weights.nbytes


def native_linear(
    linear: torch.nn.Linear | QuantizedLinear, activation: Activation = Activation.NONE, *, num_threads: int
) -> NativeLinear | None:
    """Returns a layer by our kernel with fused `activation`, or None if the kernel cannot compute it.

    Raises NativeLibraryError.
    """
    if not packable(linear):
        return None
    with torch.inference_mode():
        layer = NativeLinear(packed(weight_of(linear), linear.bias), num_threads, activation=activation)
        return layer if agrees_with_plain(layer, linear, activation) else None
