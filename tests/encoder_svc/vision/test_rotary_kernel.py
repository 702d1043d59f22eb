"""The rotary embedding of towers, run by Triton's interpreter, against transformers' function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

# Finds Triton.
from tests.decoder_svc.runner.cuda import interpreted_triton

from encoder_svc.vision import rotary_kernel  # isort: skip

assert interpreted_triton.TRITON_FOLDER
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3}


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 72), (3, 3, 80), (1, 1, 6)])
@pytest.mark.parametrize("num_tokens", [1, 16, 37])
def test_queries_and_keys_are_rotated(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, num_tokens: int
) -> None:
    merged = noise(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=0).to(dtype)
    before = merged.clone()
    # Cosines and sines of different angles, also of the two halves.
    cosines, sines = noise(num_tokens, head_dim, seed=1).cos(), noise(num_tokens, head_dim, seed=2).sin()
    found = rotary_kernel.rotated_heads(merged, cosines, sines, num_heads + num_kv_heads)
    query, key, _ = merged.view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected = torch.cat(apply_rotary_pos_emb_vision(query, key, cosines, sines), dim=1)
    assert torch.equal(merged, before)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_angles_of_the_heads_element_type_and_with_strides_are_taken_as_well() -> None:
    merged, angles = noise(5, 3 * 2 * 8, seed=0), noise(8, 5, seed=1).T
    found = rotary_kernel.rotated_heads(merged, angles.cos(), angles.sin(), 4)
    query, key, _ = merged.view(5, 6, 8).split(2, dim=1)
    expected = torch.cat(apply_rotary_pos_emb_vision(query, key, angles.cos(), angles.sin()), dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
