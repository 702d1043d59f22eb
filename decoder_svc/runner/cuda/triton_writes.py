"""Writes keys and values to their slots in Triton, as they are or as codes of 8 bits.

Codes are from -127 to 127, with a scale for each head and token (ADR 47). If a number of a head is infinite or NaN, so
are the results of all tokens that see this one, and of no others: the key becomes NaN, and the value, which is
multiplied by 0 for tokens that do not see it, becomes 0.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decoder_svc.runner.cuda.paged_backend import LayerPools

_LARGEST_CODE = tl.constexpr(127.0)


@triton.jit
def are_finite(numbers):
    """Returns whether all numbers of a head are finite."""
    # A comparison with NaN is false.
    return tl.min((tl.abs(numbers.to(tl.float32)) < float("inf")).to(tl.int32), 0) > 0


@triton.jit
def scale_of(largest):
    """Returns the scale of a head's numbers, and the factor that makes codes of them, from their largest size."""
    scale = largest / _LARGEST_CODE
    return scale, tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)


@triton.jit
def codes_of(numbers, factor):
    """Returns the codes, rounded to nearest. Numbers so small that their factor is infinite get 1."""
    scaled = numbers * factor
    nearest = tl.where(scaled < 0, scaled - 0.5, scaled + 0.5)
    # The conversion truncates towards zero. A comparison with NaN is false.
    return tl.where(tl.abs(nearest) < 128.0, nearest, 1.0).to(tl.int8)


@triton.jit
def _store(
    pool, scales, place, numbers, is_number, instead, dims, is_dim, HEAD_DIM: tl.constexpr, IS_ROUNDED: tl.constexpr
):
    """Writes the numbers of one head to its place in a pool, or another one instead: elements, or codes and a scale."""
    if IS_ROUNDED:
        numbers = tl.where(is_number, numbers, 0.0).to(tl.float32)
        scale, factor = scale_of(tl.max(tl.abs(numbers), 0))
        tl.store(scales + place, tl.where(is_number, scale, instead))
        numbers = codes_of(numbers, factor)
    else:
        numbers = tl.where(is_number, numbers, instead)
    tl.store(pool + place * HEAD_DIM + dims, numbers, mask=is_dim)


@triton.jit
def _write(
    key, value, slots, keys, values, key_scales, value_scales, key_row, key_head, value_row, value_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Writes one head of one token. Grid: tokens, key heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    place = tl.load(slots + token) * NUM_KV_HEADS + head
    new_key = tl.load(key + token * key_row + head * key_head + dims, mask=is_dim, other=0.0)
    is_number = are_finite(new_key)
    if VALUE_DIM == HEAD_DIM:
        new_value = tl.load(value + token * value_row + head * value_head + dims, mask=is_dim, other=0.0)
        is_number = is_number & are_finite(new_value)
        _store(values, value_scales, place, new_value, is_number, 0.0, dims, is_dim, HEAD_DIM, IS_ROUNDED)
        _store(keys, key_scales, place, new_key, is_number, float("nan"), dims, is_dim, HEAD_DIM, IS_ROUNDED)
    else:
        # The value is the first part of the key, so only the other part is NaN. Latents are not rounded.
        instead = tl.where(dims < VALUE_DIM, 0.0, float("nan"))
        _store(keys, key_scales, place, new_key, is_number, instead, dims, is_dim, HEAD_DIM, False)


def write(key: Tensor, value: Tensor, slots: Tensor, pools: LayerPools, value_dim: int) -> None:
    """Writes `key` and `value` `[num_tokens, kv_heads, head_dim]` to their slots in the pools.

    Values of fewer than `head_dim` numbers are parts of keys, and are not written.
    """
    key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
    num_tokens, num_kv_heads, head_dim = key.shape
    _write[(num_tokens, num_kv_heads)](
        key, value, slots, pools.keys, pools.values, pools.key_scales, pools.value_scales,
        *key.stride()[:2], *value.stride()[:2],
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim),
        VALUE_DIM=value_dim, IS_ROUNDED=pools.is_rounded,
    )  # fmt: skip
