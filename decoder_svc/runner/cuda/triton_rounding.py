"""Keys and values of 8 bits in Triton: codes from -127 to 127 with a scale for each head and token (ADR 47).

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
def scale_of(largest, total):
    """Returns the scale of a head's numbers, and the factor that makes codes of them.

    Takes the largest of their absolute sizes and the sum of these. The scale is NaN if a number is infinite or NaN.
    """
    scale = largest / _LARGEST_CODE
    # The largest may hide NaN, the sum does not. A comparison with NaN is false.
    is_number = total < float("inf")
    factor = tl.where(is_number & (scale > 0), 1.0 / scale, 0.0)
    return tl.where(is_number, scale, float("nan")), factor


@triton.jit
def codes_of(numbers, factor):
    """Returns the codes, rounded to nearest; 1 for NaN, which the scale shows."""
    scaled = numbers * factor
    nearest = tl.where(scaled < 0, scaled - 0.5, scaled + 0.5)
    # The conversion truncates towards zero. A comparison with NaN is false.
    return tl.where(tl.abs(nearest) < 128.0, nearest, 1.0).to(tl.int8)


@triton.jit
def _write(
    source, slots, codes, scales,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Rounds one head of one token and writes it to its slot. Grid: tokens, key heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    numbers = tl.load(source + (token * NUM_KV_HEADS + head) * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    sizes = tl.abs(numbers)
    scale, factor = scale_of(tl.max(sizes, 0), tl.sum(sizes, 0))
    place = tl.load(slots + token) * NUM_KV_HEADS + head
    tl.store(scales + place, scale)
    tl.store(codes + place * HEAD_DIM + dims, codes_of(numbers, factor), mask=is_dim)


def write_rounded(key: Tensor, value: Tensor, slots: Tensor, pools: LayerPools) -> None:
    """Writes `key` and `value` `[num_tokens, kv_heads, head_dim]` to their slots in rounded pools."""
    num_tokens, num_kv_heads, head_dim = key.shape
    for new, codes, scales in ((key, pools.keys, pools.key_scales), (value, pools.values, pools.value_scales)):
        _write[(num_tokens, num_kv_heads)](
            new.contiguous(), slots, codes, scales,
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim),
        )  # fmt: skip
