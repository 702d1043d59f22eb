"""The kernels for rows of a layer, run by Triton's interpreter, against transformers' modules."""

from __future__ import annotations

import pytest
import torch

from tests.decoder_svc.runner.cuda.interpreted_triton import triton_rowwise
from tests.decoder_svc.runner.cuda.layer_values import DTYPES, close, noise, norm_of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 576])
@pytest.mark.parametrize("has_delta", [False, True])
def test_a_norm_of_a_sum(dtype: torch.dtype, size: int, has_delta: bool) -> None:
    hidden = noise(3, size, dtype=dtype)
    delta = noise(3, size, dtype=dtype, seed=1) if has_delta else None
    norm = norm_of(size, dtype)
    before = hidden.clone()
    summed, normed = triton_rowwise.add_norm(hidden, delta, norm.weight, norm.variance_epsilon)
    expected = hidden if delta is None else hidden + delta
    assert torch.equal(summed, expected)
    assert torch.equal(hidden, before)
    close(normed, norm(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 1500])
def test_a_gated_activation(dtype: torch.dtype, size: int) -> None:
    merged = noise(3, 2 * size, dtype=dtype) * 4
    merged[0, 0], merged[1, 1] = 200.0, -200.0
    gate, up = merged.split(size, dim=1)
    close(triton_rowwise.gated(merged), torch.nn.functional.silu(gate) * up)
