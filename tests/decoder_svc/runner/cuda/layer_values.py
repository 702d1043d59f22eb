"""Random values and tolerances for tests of kernels between matrix products."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

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
