"""The walk of a program over the keys and values of one key head, with a running maximum and sum.

There is a form for plain pools, one for pools of 8 bits (ADR 47), and one for latents (ADR 58), whose values are the
first elements of keys. All return per row the weighted sum of values, the sum of weights and the maximum score, to
which both are relative (FlashAttention-2, arXiv:2307.08691).

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _blocks_at(table, slot, end, NUM_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Returns the block of each slot of a tile; 0 from `end` on."""
    slots = slot + tl.arange(0, NUM_KEYS)
    return tl.load(table + slots // BLOCK_SIZE, mask=slots < end, other=0).to(tl.int64)


@triton.jit
def _weighed(scores, key, is_key, start, stop, largest, total, softcap, HAS_SOFTCAP: tl.constexpr):
    """Returns the weights of one tile of keys, the factor of the sums so far, the sum of weights and the maximum."""
    if HAS_SOFTCAP:
        # softcap · tanh(score / softcap), written with exp(-2|x|), which cannot overflow.
        power = tl.exp(-2 * tl.abs(scores) / softcap)
        scores = softcap * tl.where(scores < 0, power - 1, 1 - power) / (1 + power)
    is_seen = is_key[None, :] & (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
    scores = tl.where(is_seen, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen nothing yet has no maximum to subtract.
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    weights = tl.exp(scores - shift[:, None])
    kept = tl.exp(largest - shift)
    return weights, kept, total * kept + tl.sum(weights, 1), larger


@triton.jit
def walk(
    queries, start, stop, begin, end, first_key, keys, values, table, scale, softcap,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Walks over the keys [begin, end) of one head.

    Returns per row the weighted sum of values, the sum of weights and the maximum score, to which both are relative.
    """
    dims = tl.arange(0, PADDED_DIM)
    largest = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.full([NUM_ROWS], 0.0, tl.float32)
    sums = tl.full([NUM_ROWS, PADDED_DIM], 0.0, tl.float32)
    # The blocks of a tile are looked up one tile earlier, so that its keys and values can be loaded ahead.
    block = _blocks_at(table, begin - first_key, end - first_key, NUM_KEYS, BLOCK_SIZE)
    for first in range(begin, end, NUM_KEYS):
        key = first + tl.arange(0, NUM_KEYS)
        is_key = key < end
        slot_place = (block * BLOCK_SIZE + (key - first_key) % BLOCK_SIZE) * NUM_KV_HEADS
        place = (slot_place * HEAD_DIM)[:, None] + dims[None, :]
        block = _blocks_at(table, first + NUM_KEYS - first_key, end - first_key, NUM_KEYS, BLOCK_SIZE)
        is_value = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        tile = tl.load(keys + place, mask=is_value, other=0.0)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        weights, kept, total, largest = _weighed(scores, key, is_key, start, stop, largest, total, softcap, HAS_SOFTCAP)
        tile = tl.load(values + place, mask=is_value, other=0.0)
        sums = sums * kept[:, None] + tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")
    return sums, total, largest


@triton.jit
def _number_of(code, dtype):
    """Returns a code from its lowest 8 bits, to which 128 was added.

    They become the last bits of a float32 number between 2²³ and 2²⁴. Conversions of integers take four times as long.
    """
    return (((code & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0).to(dtype)


@triton.jit
def _halves(pairs, dtype):
    """Returns the codes of even and of odd dimensions, of which `pairs` holds two in each number of 16 bits."""
    codes = pairs.to(tl.int32) ^ 0x8080
    return _number_of(codes, dtype), _number_of(codes >> 8, dtype)


@triton.jit
def walk_rounded(
    even_queries, odd_queries, start, stop, begin, end, first_key, keys, values, key_scales, value_scales, table,
    scale, softcap,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Does what `walk` does with keys and values of 8 bits.

    Two codes are read as one number of 16 bits, which the matrix units' loads of transposed values can handle. Those of
    single bytes take longer than reading twice as many bytes from the device's memory.
    """
    half_dim: tl.constexpr = HEAD_DIM // 2
    padded_half: tl.constexpr = PADDED_DIM // 2
    pairs = tl.arange(0, padded_half)
    largest = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.full([NUM_ROWS], 0.0, tl.float32)
    even_sums = tl.full([NUM_ROWS, padded_half], 0.0, tl.float32)
    odd_sums = tl.full([NUM_ROWS, padded_half], 0.0, tl.float32)
    block = _blocks_at(table, begin - first_key, end - first_key, NUM_KEYS, BLOCK_SIZE)
    for first in range(begin, end, NUM_KEYS):
        key = first + tl.arange(0, NUM_KEYS)
        is_key = key < end
        slot_place = (block * BLOCK_SIZE + (key - first_key) % BLOCK_SIZE) * NUM_KV_HEADS
        place = (slot_place * half_dim)[:, None] + pairs[None, :]
        block = _blocks_at(table, first + NUM_KEYS - first_key, end - first_key, NUM_KEYS, BLOCK_SIZE)
        is_value = is_key[:, None] & (pairs < half_dim)[None, :]
        even, odd = _halves(tl.load(keys + place, mask=is_value, other=0), even_queries.dtype)
        scores = tl.dot(even_queries, tl.trans(even), input_precision="ieee")
        scores = tl.dot(odd_queries, tl.trans(odd), scores, input_precision="ieee") * scale
        scores = scores * tl.load(key_scales + slot_place, mask=is_key, other=0.0)[None, :]
        weights, kept, total, largest = _weighed(scores, key, is_key, start, stop, largest, total, softcap, HAS_SOFTCAP)
        even, odd = _halves(tl.load(values + place, mask=is_value, other=0), even_queries.dtype)
        weights = weights * tl.load(value_scales + slot_place, mask=is_key, other=0.0)[None, :]
        weights = weights.to(even.dtype)
        even_sums = even_sums * kept[:, None] + tl.dot(weights, even, input_precision="ieee")
        odd_sums = odd_sums * kept[:, None] + tl.dot(weights, odd, input_precision="ieee")
    return tl.reshape(tl.join(even_sums, odd_sums), [NUM_ROWS, PADDED_DIM]), total, largest


@triton.jit
def walk_latents(
    queries, rotary_queries, start, stop, begin, end, first_key, keys, table, scale, softcap,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr, PADDED_ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Does what `walk` does with keys whose first elements are their values. There is one key head.

    A tile of latents is loaded once, and multiplied with queries and with weights. Queries come in two parts as well.
    """
    dims, rotary_dims = tl.arange(0, PADDED_VALUE), tl.arange(0, PADDED_ROTARY)
    largest = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.full([NUM_ROWS], 0.0, tl.float32)
    sums = tl.full([NUM_ROWS, PADDED_VALUE], 0.0, tl.float32)
    block = _blocks_at(table, begin - first_key, end - first_key, NUM_KEYS, BLOCK_SIZE)
    for first in range(begin, end, NUM_KEYS):
        key = first + tl.arange(0, NUM_KEYS)
        is_key = key < end
        place = ((block * BLOCK_SIZE + (key - first_key) % BLOCK_SIZE) * HEAD_DIM)[:, None]
        block = _blocks_at(table, first + NUM_KEYS - first_key, end - first_key, NUM_KEYS, BLOCK_SIZE)
        is_value = is_key[:, None] & (dims < VALUE_DIM)[None, :]
        is_rotary = is_key[:, None] & (rotary_dims < HEAD_DIM - VALUE_DIM)[None, :]
        latents = tl.load(keys + place + dims[None, :], mask=is_value, other=0.0)
        rotary = tl.load(keys + VALUE_DIM + place + rotary_dims[None, :], mask=is_rotary, other=0.0)
        scores = tl.dot(queries, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rotary_queries, tl.trans(rotary), scores, input_precision="ieee") * scale
        weights, kept, total, largest = _weighed(scores, key, is_key, start, stop, largest, total, softcap, HAS_SOFTCAP)
        sums = sums * kept[:, None] + tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")
    return sums, total, largest
