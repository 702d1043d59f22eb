"""Attention within windows of different lengths, in Triton: one call for all windows of all images.

One program takes some consecutive tokens and one head. It finds the window of each token by binary search on the device
and walks over the keys of these windows with a running maximum and sum (FlashAttention-2, arXiv:2307.08691).

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Smallest side of a matrix that the matrix units multiply.
_MIN_TILE = 16
# Shared memory of a program on GPUs that have least of it, those of compute capability 8.6, 8.9 and 12.0.
_LEAST_SHARED_BYTES = 99 << 10


@triton.jit
def _window(token, bounds, num_windows, num_steps):
    """Returns the bounds [start, stop) of each token's window."""
    low = token * 0
    high = low + num_windows
    for _ in range(num_steps):
        middle = (low + high) // 2
        is_after = tl.load(bounds + middle) <= token
        low, high = tl.where(is_after, middle, low), tl.where(is_after, high, middle)
    return tl.load(bounds + low), tl.load(bounds + low + 1)


# Numbers that differ between images. A variant for 1 and for multiples of 16 would be compiled while serving.
@triton.jit(do_not_specialize=["num_tokens", "num_windows", "num_steps"])
def _attend(
    query, keys, values, output, bounds, num_tokens, num_windows, num_steps, scale,
    QUERY_TOKEN: tl.constexpr, QUERY_HEAD: tl.constexpr, KEYS_TOKEN: tl.constexpr, KEYS_HEAD: tl.constexpr,
    VALUES_TOKEN: tl.constexpr, VALUES_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
):  # fmt: skip
    """Computes some tokens of one head. Grid: tiles of tokens, heads. `output` is `[num_tokens, heads, head_dim]`."""
    head = tl.program_id(1)
    shared = head // GROUP
    token = tl.program_id(0) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    is_row = token < num_tokens
    start, stop = _window(tl.minimum(token, num_tokens - 1), bounds, num_windows, num_steps)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    is_stored = is_row[:, None] & is_dim[None, :]
    token = token.to(tl.int64)
    queries = tl.load(
        query + head * QUERY_HEAD + token[:, None] * QUERY_TOKEN + dims[None, :], mask=is_stored, other=0.0
    )  # fmt: skip
    largest = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.full([NUM_ROWS], 0.0, tl.float32)
    sums = tl.full([NUM_ROWS, PADDED_DIM], 0.0, tl.float32)
    begin = tl.min(start, 0)
    end = tl.max(stop, 0)
    # The loop begins at 0: Triton 3.8 loads no tiles ahead in a loop that begins at the result of a reduction.
    for first in range(0, end - begin, NUM_KEYS):
        key = begin + first + tl.arange(0, NUM_KEYS)
        is_key = key < end
        is_value = is_key[:, None] & is_dim[None, :]
        place = key.to(tl.int64)[:, None]
        tile = tl.load(keys + shared * KEYS_HEAD + place * KEYS_TOKEN + dims[None, :], mask=is_value, other=0.0)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        is_seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum to subtract.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - shift[:, None])
        kept = tl.exp(largest - shift)
        tile = tl.load(values + shared * VALUES_HEAD + place * VALUES_TOKEN + dims[None, :], mask=is_value, other=0.0)
        sums = sums * kept[:, None] + tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        largest = larger
    target = output + ((token * NUM_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(target, (sums / total[:, None]).to(output.dtype.element_ty), mask=is_stored)


def attend_in_windows(query: Tensor, keys: Tensor, values: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """Returns the attention of tokens that see all tokens of their window and no others.

    Arguments and result are `[num_tokens, heads, head_dim]`, with any strides. Keys and values may have fewer heads
    than queries (grouped-query attention). Window i has the tokens [bounds[i], bounds[i + 1]); the bounds are on the
    device, and the host does not read them.
    """
    query, keys, values = (_by_token(each) for each in (query, keys, values))
    num_tokens, num_heads, head_dim = query.shape
    padded_dim = max(_MIN_TILE, triton.next_power_of_2(head_dim))
    num_rows, num_keys, num_stages = tile_sizes(padded_dim * query.element_size(), _shared_bytes(query.device))
    num_windows = len(bounds) - 1
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _attend[(triton.cdiv(num_tokens, num_rows), num_heads)](
        query, keys, values, output, bounds.to(torch.int32), num_tokens, num_windows, num_windows.bit_length(), scale,
        QUERY_TOKEN=query.stride(0), QUERY_HEAD=query.stride(1), KEYS_TOKEN=keys.stride(0), KEYS_HEAD=keys.stride(1),
        VALUES_TOKEN=values.stride(0), VALUES_HEAD=values.stride(1),
        NUM_HEADS=num_heads, GROUP=num_heads // keys.shape[1], HEAD_DIM=head_dim, PADDED_DIM=padded_dim,
        NUM_ROWS=num_rows, NUM_KEYS=num_keys, num_stages=num_stages,
    )  # fmt: skip
    return output


def tile_sizes(key_bytes: int, shared_bytes: int) -> tuple[int, int, int]:
    """Returns the tokens of a program, the keys of a tile, and the number of stages, which have a tile each.

    `key_bytes` is the size of one key of one head, `shared_bytes` the shared memory that a program may take. Tiles of
    keys have 16 KiB. With two stages, queries, keys and values take at most 96 KiB of shared memory.
    """
    num_rows = 64 if key_bytes <= 512 else 32
    num_keys = 64 if key_bytes <= 256 else 32 if key_bytes <= 512 else 16
    return num_rows, num_keys, 3 if (num_rows + 3 * 2 * num_keys) * key_bytes <= shared_bytes else 2


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Returns the shared memory that one program may take on a device."""
    if device.type != "cuda":
        return _LEAST_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED_BYTES)


def _by_token(tensor: Tensor) -> Tensor:
    """Returns the tensor with strides that do not depend on the number of tokens, which would be compiled anew."""
    is_by_token = tensor.stride(2) == 1 and tensor.stride(0) > tensor.stride(1)
    return tensor if is_by_token else tensor.contiguous()
