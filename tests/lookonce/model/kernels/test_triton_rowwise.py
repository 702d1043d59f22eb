"""The kernels for rows of a layer, run by Triton's interpreter, against transformers' modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.decoder_svc.runner.cuda.interpreted_triton import triton_rowwise

DTYPES = [torch.float32, torch.float16]
# One unit in the last place of float16; a few of float32, which sums in another order.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 1e-3}


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCES[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def norm_of(size: int, dtype: torch.dtype) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(size, eps=1e-5).to(dtype)
    norm.weight.data = 1 + noise(size, dtype=dtype, seed=9) / 4
    return norm


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
