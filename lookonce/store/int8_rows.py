"""Rows as int8 with a scale per row and level: half of bfloat16's bytes. The only place that knows their layout.

    row = (1 + num_levels) scales, float32 | (1 + num_levels) * hidden_size values, int8

Little-endian. An element is its value times the scale of its level; values lie in [-127, 127], and the scale is the
level's largest magnitude over 127. Only the services import this module; it needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_SCALE_BYTES = 4
_MAX_VALUE = 127
# Rows are worked on in parts of so many elements, whose float32 stays in the CPU's cache: 8687 rows of 3584 elements
# take 34 ms into bfloat16 on one thread, and 160 ms in one piece (2026-11-21).
_PART_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """The rows of one image, and what they lost."""

    # uint8 [num_rows, row_bytes], contiguous.
    data: Tensor
    # ‖x − x'‖ / ‖x‖ over all rows and levels; 0 where x is zero.
    relative_error: float


def quantise(rows: Tensor, num_levels: int) -> QuantisedRows:
    """`rows` are finite floats, [num_rows, (1 + num_levels) * hidden_size]; an element is off by half a scale at most.

    A level whose scale would be below float32's normal numbers becomes zeros.
    """
    elements = rows.unflatten(1, (1 + num_levels, -1))
    num_rows, num_scales, hidden_size = elements.shape
    data = torch.empty((num_rows, num_scales * (_SCALE_BYTES + hidden_size)), dtype=torch.uint8, device=rows.device)
    scales = torch.empty((num_rows, num_scales, 1), dtype=torch.float32, device=rows.device)
    values = _values(data, num_scales)
    # Squared, in float64.
    error = norm = 0.0
    for part in _parts(elements):
        exact = elements[part].float()
        scale = exact.abs().amax(dim=2, keepdim=True) / _MAX_VALUE
        scale[scale < torch.finfo(torch.float32).tiny] = 0
        # In units of the scale, where nothing overflows.
        exact = exact / scale.masked_fill(scale == 0, 1)
        rounded = exact.round()
        scales[part] = scale
        values[part] = rounded
        weight = scale.double().square()
        error += float((weight * (exact - rounded).square().sum(dim=2, keepdim=True)).sum())
        norm += float((weight * exact.square().sum(dim=2, keepdim=True)).sum())
    data[:, : num_scales * _SCALE_BYTES] = scales.view(num_rows, num_scales).view(torch.uint8)
    return QuantisedRows(data, (error / norm) ** 0.5 if norm else 0.0)


def dequantise(data: Tensor, num_levels: int, dtype: torch.dtype) -> Tensor:
    """Rows [num_rows, (1 + num_levels) * hidden_size] from uint8 [num_rows, row_bytes], on the same device.

    Multiplied in float32 and rounded to `dtype` once.
    """
    num_scales = 1 + num_levels
    # Copied, since rows may begin anywhere in memory.
    scales = torch.empty((len(data), num_scales), dtype=torch.float32, device=data.device)
    scales.view(torch.uint8).copy_(data[:, : num_scales * _SCALE_BYTES])
    values = _values(data, num_scales)
    elements = torch.empty(values.shape, dtype=dtype, device=data.device)
    for part in _parts(elements):
        torch.mul(values[part], scales[part].unsqueeze(2), out=elements[part])
    return elements.flatten(1)


def _values(data: Tensor, num_scales: int) -> Tensor:
    """The int8 values [num_rows, num_scales, hidden_size] inside of `data`, not copied."""
    return data[:, num_scales * _SCALE_BYTES :].view(torch.int8).unflatten(1, (num_scales, -1))


def _parts(elements: Tensor) -> Iterator[slice]:
    """Ranges of whole rows."""
    num_rows = max(1, _PART_ELEMENTS // elements[0].numel())
    for start in range(0, len(elements), num_rows):
        yield slice(start, start + num_rows)
