"""Triton kernels for the rows of a transformer layer: the norm of a sum, and a gated activation.

Each rounds to the element type where transformers' modules do, so that results agree to the last few bits.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program of the activation.
_ACTIVATED = 1024


@triton.jit
def _add_norm(
    hidden, delta, weight, summed, normed, epsilon,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """Adds two rows and computes the RMS norm of the sum. Grid: tokens."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, PADDED_SIZE)
    is_column = columns < SIZE
    dtype = normed.dtype.element_ty
    values = tl.load(hidden + row + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + row + columns, mask=is_column, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(summed + row + columns, rounded, mask=is_column)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    scaled = (values * scale).to(dtype).to(tl.float32)
    result = scaled * tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + row + columns, result.to(dtype), mask=is_column)


@triton.jit
def _gated(merged, output, SIZE: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """Computes SiLU(gate) · up of one row, [gate, up]. Grid: tokens, parts of a row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    is_column = columns < SIZE
    dtype = output.dtype.element_ty
    gate = tl.load(merged + token * 2 * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(merged + token * 2 * SIZE + SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    # exp(-|x|) cannot overflow: SiLU(x) = x / (1 + exp(-x)) = x · exp(x) / (1 + exp(x)).
    power = tl.exp(-tl.abs(gate))
    active = gate * tl.where(gate < 0, power, 1.0) / (1 + power)
    tl.store(output + token * SIZE + columns, (active.to(dtype).to(tl.float32) * up).to(dtype), mask=is_column)


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns the sum of two contiguous tensors `[num_tokens, size]`, and its RMS norm."""
    num_tokens, size = hidden.shape
    normed = torch.empty_like(hidden)
    summed = hidden if delta is None else torch.empty_like(hidden)
    if num_tokens:
        _add_norm[(num_tokens,)](
            hidden, hidden if delta is None else delta, weight, summed, normed, epsilon,
            SIZE=size, PADDED_SIZE=triton.next_power_of_2(size), HAS_DELTA=delta is not None,
        )  # fmt: skip
    return summed, normed


def gated(merged: Tensor) -> Tensor:
    """Returns SiLU(gate) · up of a contiguous tensor `[num_tokens, 2 · size]`, gates first."""
    num_tokens, size = len(merged), merged.shape[1] // 2
    output = torch.empty(num_tokens, size, dtype=merged.dtype, device=merged.device)
    _gated[(num_tokens, triton.cdiv(size, _ACTIVATED))](merged, output, SIZE=size, NUM_COLUMNS=_ACTIVATED)
    return output
