"""Rotary embedding of a vision tower's queries and keys in Triton, straight from the merged projection.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens and heads of a program, which loads the angles once for all of its heads.
_NUM_TOKENS = 16
_NUM_HEADS = 8


# The number of tokens differs between images. A variant for 1 and for multiples of 16 would be compiled while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def _rotate(
    merged, cosines, sines, output, num_tokens,
    ROW_SIZE: tl.constexpr, NUM_ROTATED: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr,
):  # fmt: skip
    """Rotates some heads of some tokens in float32. Grid: tiles of tokens, tiles of heads."""
    token = tl.program_id(0) * NUM_TOKENS + tl.arange(0, NUM_TOKENS)
    columns = tl.arange(0, PADDED_HALF)[None, :]
    is_element = (token < num_tokens)[:, None] & (columns < HALF)
    token = token.to(tl.int64)[:, None]
    angles = token * (2 * HALF) + columns
    first_cosine = tl.load(cosines + angles, mask=is_element, other=0.0).to(tl.float32)
    first_sine = tl.load(sines + angles, mask=is_element, other=0.0).to(tl.float32)
    second_cosine = tl.load(cosines + HALF + angles, mask=is_element, other=0.0).to(tl.float32)
    second_sine = tl.load(sines + HALF + angles, mask=is_element, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    for index in range(NUM_HEADS):
        head = tl.program_id(1) * NUM_HEADS + index
        is_rotated = is_element & (head < NUM_ROTATED)
        source = merged + token * ROW_SIZE + head * (2 * HALF) + columns
        first = tl.load(source, mask=is_rotated, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=is_rotated, other=0.0).to(tl.float32)
        target = output + (token * NUM_ROTATED + head) * (2 * HALF) + columns
        tl.store(target, (first * first_cosine - second * first_sine).to(dtype), mask=is_rotated)
        tl.store(target + HALF, (second * second_cosine + first * second_sine).to(dtype), mask=is_rotated)


def rotated_heads(merged: Tensor, cosines: Tensor, sines: Tensor, num_rotated: int) -> Tensor:
    """Returns the first heads of `merged` with rotary embedding, `[num_tokens, num_rotated, head_dim]`.

    `merged` has the heads of queries, keys and values, `[num_tokens, heads · head_dim]`; `cosines` and `sines` are
    `[num_tokens, head_dim]`. The result is transformers' `apply_rotary_pos_emb_vision`, rounded once.
    """
    merged, cosines, sines = merged.contiguous(), cosines.contiguous(), sines.contiguous()
    num_tokens, head_dim = cosines.shape
    output = torch.empty(num_tokens, num_rotated, head_dim, dtype=merged.dtype, device=merged.device)
    _rotate[(triton.cdiv(num_tokens, _NUM_TOKENS), triton.cdiv(num_rotated, _NUM_HEADS))](
        merged, cosines, sines, output, num_tokens,
        ROW_SIZE=merged.shape[1], NUM_ROTATED=num_rotated, HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2), NUM_TOKENS=_NUM_TOKENS, NUM_HEADS=_NUM_HEADS,
    )  # fmt: skip
    return output
