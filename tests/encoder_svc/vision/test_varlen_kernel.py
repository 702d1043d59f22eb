"""The attention of towers with windows, run by Triton's interpreter, against SDPA in each window."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

# Finds Triton.
from tests.decoder_svc.runner.cuda import interpreted_triton

from encoder_svc.vision import varlen_kernel  # isort: skip

assert interpreted_triton.TRITON_FOLDER
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3}


Parts = tuple[Tensor, Tensor, Tensor]


def parts_of(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Parts:
    """Returns queries, keys and values as parts of one tensor, as a merged projection gives them."""
    merged = torch.randn(num_tokens, 3, num_heads, head_dim, generator=torch.Generator().manual_seed(0))
    query, keys, values = merged.to(dtype).unbind(1)
    return query, keys, values


def expected(parts: Parts, bounds: list[int], scale: float) -> Tensor:
    windows = [
        torch.nn.functional.scaled_dot_product_attention(
            *(part[start:stop].double().transpose(0, 1)[None] for part in parts), scale=scale
        )[0].transpose(0, 1)
        for start, stop in itertools.pairwise(bounds)
    ]
    return torch.cat(windows)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    num_heads=st.integers(1, 2),
    head_dim=st.sampled_from((8, 72, 80)),
    dtype=st.sampled_from((torch.float32, torch.float16)),
)
def test_windows_of_any_lengths_give_sdpas_results(
    lengths: list[int], num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    bounds = [0, *itertools.accumulate(lengths)]
    parts = parts_of(bounds[-1], num_heads, head_dim, dtype)
    found = varlen_kernel.attend_in_windows(*parts, torch.tensor(bounds, dtype=torch.int32), 0.2)
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), expected(parts, bounds, 0.2), rtol=tolerance, atol=tolerance)


def test_heads_before_tokens_are_taken_as_well() -> None:
    bounds = [0, 20, 50]
    parts = parts_of(50, 2, 16, torch.float32)
    query, keys, values = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts)
    found = varlen_kernel.attend_in_windows(query, keys, values, torch.tensor(bounds), 0.2)
    torch.testing.assert_close(found.double(), expected(parts, bounds, 0.2), rtol=2e-5, atol=2e-5)


# The sizes hold for capability 8.6, 8.0 and 9.0 (CUDA C++ Programming Guide, technical specifications).
@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("key_bytes", [32, 128, 256, 512, 1024])
def test_tiles_fit_into_shared_memory(key_bytes: int, shared_bytes: int) -> None:
    rows, keys, stages = varlen_kernel.tile_sizes(key_bytes, shared_bytes)
    assert min(rows, keys) >= 16
    assert stages >= 2
    # Queries, and keys and values of each stage.
    assert (rows + 2 * stages * keys) * key_bytes <= shared_bytes


def test_large_devices_have_three_stages() -> None:
    """Heads of 80 elements, which are padded to 128, in bfloat16."""
    assert varlen_kernel.tile_sizes(256, 227 << 10) == (64, 64, 3)
    assert varlen_kernel.tile_sizes(256, 99 << 10) == (64, 64, 2)
