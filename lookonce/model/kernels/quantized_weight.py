"""Weights of linear layers as codes: `weight = number of code · scale + offset`, with a scale for each group of inputs.

Groups of 128 inputs and rounding to the nearest are what most production folders use (GPTQ, arXiv:2210.17323, and AWQ,
arXiv:2306.00978, change which integers are chosen, not this form).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

# Inputs that share a scale where the weights are quantized here.
GROUP_INPUTS = 128


class CodeForm(enum.IntEnum):
    """A kind of codes; the values are those of `CodeForm` in native/layer.h."""

    # Integers from 0 to 15.
    INT4 = 0
    # Integers from -128 to 127.
    INT8 = 1
    # Floating point, e4m3fn (arXiv:2209.05433): 1 bit of sign, 4 of exponent, 3 of fraction; no infinities.
    FLOAT8 = 2

    @property
    def bits(self) -> int:
        """Bits of a code in the kernels' layout."""
        return 4 if self is CodeForm.INT4 else 8


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[outputs, inputs]` as codes. Rows can be selected by `weight[indices]`."""

    # int8 [outputs, inputs]; the bytes of float8_e4m3fn for FLOAT8.
    codes: Tensor
    # float32 [outputs, groups].
    scales: Tensor
    # float32 [outputs, groups]; 0 for FLOAT8.
    offsets: Tensor
    form: CodeForm
    # An even number of inputs; the last group may have fewer.
    group_inputs: int
    # The type of the weight that this stands for.
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The numbers of outputs and of inputs."""
        return self.codes.shape

    def __getitem__(self, rows: Tensor) -> QuantizedWeight:
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], offsets=self.offsets[rows])

    def dequantized(self) -> Tensor:
        """Returns the weight in its type."""
        num_inputs = self.shape[1]
        scales, offsets = (
            part.repeat_interleave(self.group_inputs, dim=1)[:, :num_inputs] for part in (self.scales, self.offsets)
        )
        codes = self.codes.view(torch.float8_e4m3fn) if self.form is CodeForm.FLOAT8 else self.codes
        return (codes.float() * scales + offsets).to(self.dtype)

    @property
    def layout(self) -> tuple[CodeForm, int, torch.dtype]:
        """Form, group size and type, which weights must have in common to be joined as codes."""
        return self.form, self.group_inputs, self.dtype


Weight: TypeAlias = Tensor | QuantizedWeight

# Kernels read groups of any multiple of this.
_READABLE_GROUP = 16


def quantized(weight: Tensor, bits: int) -> QuantizedWeight:
    """Rounds a weight `[outputs, inputs]` to the nearest integers, in groups of 128 inputs.

    8 bits are symmetric around 0, 4 bits cover the range from the least to the largest weight of a group. Scales and
    offsets have bfloat16's precision, so that `code · scale + offset` is exact in float32.
    """
    num_inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -num_inputs % GROUP_INPUTS)).unflatten(1, (-1, GROUP_INPUTS))
    if bits == 8:
        scales = _rounded_up(groups.abs().amax(dim=2) / 127)
        offsets = torch.zeros_like(scales)
        least, largest = -127, 127
    else:
        # 0 is in the range, because padding is 0 and must not widen it.
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        offsets = -_rounded_up(-low)
        scales = _rounded_up((high - offsets) / 15)
        least, largest = 0, 15
    steps = scales.where(scales > 0, torch.ones_like(scales))[..., None]
    codes = ((groups - offsets[..., None]) / steps).round().clamp(least, largest).to(torch.int8)
    form = CodeForm.INT8 if bits == 8 else CodeForm.INT4
    return QuantizedWeight(codes.flatten(1)[:, :num_inputs], scales, offsets, form, GROUP_INPUTS, weight.dtype)


def _rounded_up(values: Tensor) -> Tensor:
    """Returns the next numbers of bfloat16 that are not below these, which are not negative."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def concatenated(weights: Sequence[Weight]) -> Weight:
    """Returns the rows of all weights: as codes if all have the same layout, otherwise whole."""
    parts = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(parts) < len(weights) or len({part.layout for part in parts}) > 1:
        return torch.cat([whole(weight) for weight in weights])
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat([part.offsets for part in parts]),
    )


def inputs_of(weight: QuantizedWeight, share: slice) -> Weight:
    """Returns the weight of consecutive inputs, in memory of its own.

    Groups that begin before the share are divided into smaller ones with the same scale. The weight is whole if kernels
    could not read these.
    """
    group = weight.group_inputs
    codes = weight.codes[:, share].clone()
    size = group if weight.scales.shape[1] == 1 else math.gcd(group, share.start)
    # A group that was not divided is as readable as before.
    if codes.shape[1] % 2 or (size < group and size % _READABLE_GROUP):
        return weight.dequantized()[:, share].clone()
    of_part = torch.arange(share.start, share.stop, size) // group
    return replace(
        weight, codes=codes, scales=weight.scales[:, of_part], offsets=weight.offsets[:, of_part], group_inputs=size
    )


def whole(weight: Weight) -> Tensor:
    """Returns the weight as a tensor of its type."""
    return weight if isinstance(weight, Tensor) else weight.dequantized()


def padded(weight: Weight, num_rows: int = 0, num_inputs: int = 0) -> Weight:
    """Returns a weight with so many more rows, which are 0, and inputs, which must be multiplied with 0."""
    if isinstance(weight, Tensor):
        return F.pad(weight, (0, num_inputs, 0, num_rows))
    codes = F.pad(weight.codes, (0, num_inputs, 0, num_rows))
    num_groups = -(-codes.shape[1] // weight.group_inputs) - weight.scales.shape[1]
    scales, offsets = (F.pad(part, (0, num_groups, 0, num_rows)) for part in (weight.scales, weight.offsets))
    return replace(weight, codes=codes, scales=scales, offsets=offsets)


class WeightSource(Protocol):
    """A quantized weight that is computed when it is needed, and kept by nobody."""

    @property
    def shape(self) -> torch.Size:
        """The numbers of outputs and of inputs."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weight that codes stand for."""

    @property
    def stored(self) -> Iterable[Tensor]:
        """The tensors, in mapped files, of which the weight is computed."""

    def quantized(self) -> QuantizedWeight:
        """Returns the weight as codes, computed anew."""


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A WeightSource that rounds a whole weight `[outputs, inputs]` whenever it is asked, as `quantized` does."""

    weight: Tensor
    bits: int

    @property
    def shape(self) -> torch.Size:
        """The numbers of outputs and of inputs."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weight that is rounded."""
        return self.weight.dtype

    @property
    def stored(self) -> Iterable[Tensor]:
        """The tensor that is rounded."""
        return (self.weight,)

    def quantized(self) -> QuantizedWeight:
        """Returns the weight as codes, computed anew."""
        return quantized(self.weight, self.bits)


class QuantizedLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer with a quantized weight. It computes through PyTorch, slowly; the kernels take its place."""

    def __init__(self, source: QuantizedWeight | WeightSource, bias: Tensor | None) -> None:
        super().__init__()
        self._source = source
        self.bias = bias
        self.out_features, self.in_features = source.shape
        self.dtype = source.dtype

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """The weight as codes; a source reads it anew."""
        return self._source if isinstance(self._source, QuantizedWeight) else self._source.quantized()

    @property
    def stored(self) -> Iterable[Tensor]:
        """The tensors of which the weight is computed."""
        if isinstance(self._source, QuantizedWeight):
            return (self._source.codes, self._source.scales, self._source.offsets)
        return self._source.stored

    @property
    def weight(self) -> Tensor:
        """The weight `[outputs, inputs]` in its type, computed anew."""
        return self.quantized_weight.dequantized()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns outputs `[..., outputs]` of inputs `[..., inputs]`."""
        return F.linear(inputs, self.weight, self.bias)


def weight_of(linear: torch.nn.Module) -> Weight:
    """Returns the weight of a linear layer in the form in which it is stored."""
    weight: Weight = linear.quantized_weight if isinstance(linear, QuantizedLinear) else linear.weight
    return weight


def stored_tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    """Yields the tensors in which a module's weights are stored: parameters, and those of quantized layers."""
    yield from module.parameters()
    for child in module.modules():
        if isinstance(child, QuantizedLinear):
            yield from child.stored


def dtype_of(linear: torch.nn.Module) -> torch.dtype:
    """Returns the type of a linear layer's weight, or of the one that its codes stand for."""
    dtype: torch.dtype = linear.dtype if isinstance(linear, QuantizedLinear) else linear.weight.dtype
    return dtype
