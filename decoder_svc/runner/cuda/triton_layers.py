"""A Triton kernel of Llama-like layers: rotates queries and keys, and writes keys and values to their blocks.

It rounds to the element type where transformers' modules do, so that results agree to the last few bits. Rounded pools
get codes of 8 bits with a scale for each head.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoder_svc.runner.cuda.paged_backend import LayerPools
from decoder_svc.runner.cuda.triton_writes import are_finite, codes_of, scale_of


@triton.jit
def _head_norm(first, second, weight, columns, is_column, epsilon, HALF: tl.constexpr):
    """Returns the RMS norm of one head, given in halves."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + epsilon)
    first_weight = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + HALF + columns, mask=is_column, other=0.0).to(tl.float32)
    first = (first * scale).to(dtype).to(tl.float32) * first_weight
    second = (second * scale).to(dtype).to(tl.float32) * second_weight
    return first.to(dtype), second.to(dtype)


@triton.jit
def _turned(one, other, cosine, sine, SIGN: tl.constexpr):
    """Returns one · cosine + SIGN · other · sine."""
    dtype = one.dtype
    along = (one.to(tl.float32) * cosine.to(tl.float32)).to(dtype).to(tl.float32)
    across = (SIGN * other.to(tl.float32) * sine.to(tl.float32)).to(dtype).to(tl.float32)
    return (along + across).to(dtype)


@triton.jit
def _write_head(
    pool, scales, place, first, second, is_number, instead, columns, is_column,
    HALF: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Writes one head's key or value, given in halves, to its place in a pool: its elements, or codes and a scale.

    If some element is no finite number, another one is written instead; see `triton_writes.py`.
    """
    target = pool + place * 2 * HALF + columns
    if IS_ROUNDED:
        first = tl.where(is_number, first, 0.0).to(tl.float32)
        second = tl.where(is_number, second, 0.0).to(tl.float32)
        scale, factor = scale_of(tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0)))
        tl.store(scales + place, tl.where(is_number, scale, instead))
        first, second = codes_of(first, factor), codes_of(second, factor)
    else:
        first, second = tl.where(is_number, first, instead), tl.where(is_number, second, instead)
    tl.store(target, first, mask=is_column)
    tl.store(target + HALF, second, mask=is_column)


@triton.jit
def _rotate_write(
    merged, cosines, sines, slots, query_norm, key_norm, query, keys, values, key_scales, value_scales, epsilon,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Rotates queries and keys; writes keys and values to the pools. Grid: tokens, heads of all three."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    head_dim: tl.constexpr = 2 * HALF
    columns = tl.arange(0, PADDED_HALF)
    is_column = columns < HALF
    source = merged + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * head_dim + columns
    first = tl.load(source, mask=is_column, other=0.0)
    second = tl.load(source + HALF, mask=is_column, other=0.0)
    place = tl.load(slots + token) * NUM_KV_HEADS + head - NUM_HEADS
    if head >= NUM_HEADS + NUM_KV_HEADS:
        is_number = are_finite(first) & are_finite(second)
        _write_head(
            values, value_scales, place - NUM_KV_HEADS, first, second, is_number, 0.0, columns, is_column,
            HALF, IS_ROUNDED,
        )  # fmt: skip
    else:
        if HAS_NORMS:
            if head >= NUM_HEADS:
                first, second = _head_norm(first, second, key_norm, columns, is_column, epsilon, HALF)
            else:
                first, second = _head_norm(first, second, query_norm, columns, is_column, epsilon, HALF)
        angles = token * head_dim + columns
        turned = _turned(
            first, second, tl.load(cosines + angles, mask=is_column, other=0.0),
            tl.load(sines + angles, mask=is_column, other=0.0), -1,
        )  # fmt: skip
        second = _turned(
            second, first, tl.load(cosines + HALF + angles, mask=is_column, other=0.0),
            tl.load(sines + HALF + angles, mask=is_column, other=0.0), 1,
        )  # fmt: skip
        if head >= NUM_HEADS:
            value = source + NUM_KV_HEADS * head_dim
            is_number = are_finite(tl.load(value, mask=is_column, other=0.0))
            is_number = is_number & are_finite(tl.load(value + HALF, mask=is_column, other=0.0))
            is_number = is_number & are_finite(turned) & are_finite(second)
            _write_head(
                keys, key_scales, place, turned, second, is_number, float("nan"), columns, is_column, HALF, IS_ROUNDED
            )
        else:
            target = query + (token * NUM_HEADS + head) * head_dim + columns
            tl.store(target, turned, mask=is_column)
            tl.store(target + HALF, second, mask=is_column)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of the heads of queries and keys."""

    # [head_dim] each.
    query: Tensor
    key: Tensor
    epsilon: float


def rotate_write(
    merged: Tensor, angles: tuple[Tensor, Tensor], slots: Tensor, pools: LayerPools, norms: HeadNorms | None
) -> Tensor:
    """Writes rotated keys, and values, to their slots in the pools; returns rotated queries `[num_tokens, heads, dim]`.

    `merged` are queries, keys and values of all heads, `[num_tokens, (heads + 2 · key heads) · dim]`. `angles` are
    cosines and sines, `[num_tokens, dim]` each. All tensors are contiguous.
    """
    num_kv_heads, head_dim = pools.keys.shape[2:]
    num_tokens = len(merged)
    num_heads = merged.shape[1] // head_dim - 2 * num_kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=merged.dtype, device=merged.device)
    _rotate_write[(num_tokens, num_heads + 2 * num_kv_heads)](
        merged, *angles, slots, merged if norms is None else norms.query, merged if norms is None else norms.key,
        query, pools.keys, pools.values, pools.key_scales, pools.value_scales, 0.0 if norms is None else norms.epsilon,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2), HAS_NORMS=norms is not None,
        IS_ROUNDED=pools.is_rounded,
    )  # fmt: skip
    return query
