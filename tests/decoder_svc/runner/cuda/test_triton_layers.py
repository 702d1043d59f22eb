"""The rotation of queries and keys, run by Triton's interpreter, against transformers' modules."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from decoder_svc.runner.cuda.paged_backend import LayerPools
from tests.decoder_svc.runner.cuda.interpreted_triton import triton_layers
from tests.decoder_svc.runner.cuda.layer_values import DTYPES, close, noise, norm_of
from tests.decoder_svc.runner.rounded_numbers import codes_of, scales_of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 80), (7, 1, 6)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotated_heads_and_what_is_written(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool
) -> None:
    num_tokens, block_size = 5, 4
    merged = noise(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = noise(num_tokens, head_dim, dtype=torch.float32, seed=2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    pools = tuple(torch.full((3, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2))
    slots = torch.tensor([7, 0, 11, 3, 4])
    query_norm, key_norm = norm_of(head_dim, dtype), norm_of(head_dim, dtype)
    key_norm.weight.data = key_norm.weight.data.flip(0)
    norms = triton_layers.HeadNorms(query_norm.weight, key_norm.weight, 1e-5) if has_norms else None
    found = triton_layers.rotate_write(merged, (cosines, sines), slots, LayerPools(*pools, *pools), norms)

    heads = merged.view(num_tokens, -1, head_dim)
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if has_norms:
        query, key = query_norm(query), key_norm(key)
    query, key = apply_rotary_pos_emb(query[None], key[None], cosines[None], sines[None], unsqueeze_dim=2)
    close(found, query[0])
    close(pools[0].flatten(0, 1)[slots], key[0])
    assert torch.equal(pools[1].flatten(0, 1)[slots], value)
    others = [slot for slot in range(3 * block_size) if slot not in slots.tolist()]
    assert all(pool.flatten(0, 1)[others].isnan().all() for pool in pools)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rounded_pools_get_the_codes_of_what_others_get(dtype: torch.dtype, has_norms: bool) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim, block_size = 5, 4, 2, 20, 4
    merged = noise(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    merged[2, -head_dim] = torch.nan
    angles = noise(num_tokens, head_dim, dtype=torch.float32, seed=2)
    angles = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([7, 0, 11, 3, 4])
    weight = norm_of(head_dim, dtype).weight
    norms = triton_layers.HeadNorms(weight, weight, 1e-5) if has_norms else None
    shape = (3, block_size, num_kv_heads, head_dim)
    keys, values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    plain = LayerPools(keys, values, keys, values)
    rounded = LayerPools(
        *(torch.zeros(shape, dtype=torch.int8) for _ in range(2)), *(torch.zeros(shape[:3]) for _ in range(2))
    )
    wanted = triton_layers.rotate_write(merged, angles, slots, plain, norms)
    found = triton_layers.rotate_write(merged, angles, slots, rounded, norms)
    assert torch.equal(found, wanted)
    for pool, codes, scales in (
        (plain.keys, rounded.keys, rounded.key_scales),
        (plain.values, rounded.values, rounded.value_scales),
    ):
        torch.testing.assert_close(scales, scales_of(pool)[..., 0], equal_nan=True)
        # Codes under a scale of NaN do not matter.
        differences = (codes.int() - codes_of(pool).int())[scales.isfinite()].abs()
        assert differences.max() <= 1
        assert differences.float().mean() < 0.01
    # A value that is no number makes the key NaN, and is 0 itself.
    assert rounded.key_scales.isnan().nonzero().tolist() == [[2, 3, 1]]
    assert rounded.value_scales.isfinite().all()
    assert not plain.values.flatten(0, 1)[11, 1].any()
