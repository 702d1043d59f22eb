"""Paged attention in Triton: single tokens and chunks, windows, soft caps and mutual spans.

One program takes a tile of one sequence's new tokens and the query heads of one key head, as rows of one matrix. It
walks over the keys that any row sees, in place, with a running maximum and sum (FlashAttention-2, arXiv:2307.08691). If
a step has too few sequences to fill the device, several programs share a sequence's keys and their results are joined
(Flash-Decoding). Nothing is read on the host, so a step can be recorded as a graph.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep

# Smallest side of a matrix that the matrix units multiply.
_MIN_TILE = 16
# Rows of a program if a sequence has more than one new token.
_CHUNK_ROWS = 64
# Keys are split until there are this many programs per multiprocessor.
_PROGRAMS_EACH = 2
_MAX_SPLITS = 16


@triton.jit
def _seen_keys(
    position, flat_token, is_row, first_key, mutual_starts, mutual_stops, window,
    HAS_WINDOW: tl.constexpr, HAS_MUTUAL: tl.constexpr, IS_MUTUAL_BEYOND_WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns the keys [start, stop) that each row sees."""
    start = position * 0
    if HAS_WINDOW:
        start = position - window + 1
    stop = position + 1
    if HAS_MUTUAL:
        stop = tl.maximum(stop, tl.load(mutual_stops + flat_token, mask=is_row, other=0))
        if IS_MUTUAL_BEYOND_WINDOW:
            start = tl.minimum(start, tl.load(mutual_starts + flat_token, mask=is_row, other=0))
    return tl.maximum(start, first_key), stop


@triton.jit
def _part(begin, end, split, NUM_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Returns the part of the keys [begin, end) that belongs to one split: whole tiles, except at the end."""
    num_tiles = (end - begin + NUM_KEYS - 1) // NUM_KEYS
    split_len = (num_tiles + NUM_SPLITS - 1) // NUM_SPLITS * NUM_KEYS
    begin = begin + split * split_len
    return begin, tl.minimum(end, begin + split_len)


@triton.jit
def _walk(
    queries, start, stop, begin, end, first_key, keys, values, table, block_stride, slot_stride, scale, softcap,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Walks over the keys [begin, end).

    Returns per row the weighted sum of values, the sum of weights and the maximum score, to which both are relative.
    """
    dims = tl.arange(0, PADDED_DIM)
    largest = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.full([NUM_ROWS], 0.0, tl.float32)
    sums = tl.full([NUM_ROWS, PADDED_DIM], 0.0, tl.float32)
    for first in range(begin, end, NUM_KEYS):
        key = first + tl.arange(0, NUM_KEYS)
        is_key = key < end
        slot = key - first_key
        block = tl.load(table + slot // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        place = (block * block_stride + (slot % BLOCK_SIZE) * slot_stride)[:, None] + dims[None, :]
        is_value = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        tile = tl.load(keys + place, mask=is_value, other=0.0)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
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
        tile = tl.load(values + place, mask=is_value, other=0.0)
        sums = sums * kept[:, None] + tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        largest = larger
    return sums, total, largest


# The width of block tables differs between steps. A variant for each divisor of it would be compiled while serving.
@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    query, keys, values, output, partial_sums, partial_stats,
    block_table, first_keys, query_starts, kv_lens, mutual_starts, mutual_stops,
    query_token_stride, query_head_stride, output_token_stride, output_head_stride,
    block_stride, slot_stride, head_stride, table_stride,
    scale, softcap, window,
    NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_MUTUAL: tl.constexpr, IS_MUTUAL_BEYOND_WINDOW: tl.constexpr,
):  # fmt: skip
    """Computes one tile. Grid: tiles of the longest chunk, sequences, key heads · splits."""
    tokens_each: tl.constexpr = NUM_ROWS // NUM_GROUPS
    sequence = tl.program_id(1)
    kv_head = tl.program_id(2) // NUM_SPLITS
    split = tl.program_id(2) % NUM_SPLITS
    first_token = tl.load(query_starts + sequence)
    num_new = tl.load(query_starts + sequence + 1) - first_token
    if tl.program_id(0) * tokens_each >= num_new:
        return
    kv_len = tl.load(kv_lens + sequence)
    first_key = tl.load(first_keys + sequence)

    # Row r is new token r // NUM_GROUPS of the tile, query head r % NUM_GROUPS of the key head.
    rows = tl.arange(0, NUM_ROWS)
    token = tl.program_id(0) * tokens_each + rows // NUM_GROUPS
    head = kv_head * NUM_GROUPS + rows % NUM_GROUPS
    is_row = (rows < tokens_each * NUM_GROUPS) & (token < num_new)
    flat_token = (first_token + token).to(tl.int64)
    start, stop = _seen_keys(
        kv_len - num_new + token, flat_token, is_row, first_key, mutual_starts, mutual_stops, window,
        HAS_WINDOW, HAS_MUTUAL, IS_MUTUAL_BEYOND_WINDOW,
    )  # fmt: skip
    begin = tl.min(tl.where(is_row, start, kv_len), 0)
    end = tl.max(tl.where(is_row, stop, 0), 0)
    begin, end = _part(begin, end, split, NUM_KEYS, NUM_SPLITS)

    dims = tl.arange(0, PADDED_DIM)
    is_stored = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = query + flat_token * query_token_stride + head * query_head_stride
    queries = tl.load(query_rows[:, None] + dims[None, :], mask=is_stored, other=0.0)
    sums, total, largest = _walk(
        queries, start, stop, begin, end, first_key, keys + kv_head * head_stride, values + kv_head * head_stride,
        block_table + sequence * table_stride, block_stride, slot_stride, scale, softcap,
        NUM_ROWS, NUM_KEYS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, HAS_SOFTCAP,
    )  # fmt: skip
    if NUM_SPLITS == 1:
        target = output + flat_token * output_token_stride + head * output_head_stride
        # Padding rows have a total of 0.
        result = (sums / tl.where(is_row, total, 1.0)[:, None]).to(output.dtype.element_ty)
        tl.store(target[:, None] + dims[None, :], result, mask=is_stored)
    else:
        # Partial results are [num_tokens, heads, splits, …].
        num_heads = tl.num_programs(2) // NUM_SPLITS * NUM_GROUPS
        part = (flat_token * num_heads + head) * NUM_SPLITS + split
        tl.store(partial_sums + part[:, None] * PADDED_DIM + dims[None, :], sums, mask=is_row[:, None])
        tl.store(partial_stats + part * 2, largest, mask=is_row)
        tl.store(partial_stats + part * 2 + 1, total, mask=is_row)


@triton.jit
def _join(
    partial_sums, partial_stats, output, output_token_stride, output_head_stride,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one token and head. Grid: tokens, heads.

    A split without keys has the sum 0 and the maximum -inf.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    parts = (token * tl.num_programs(1) + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    largest = tl.load(partial_stats + parts * 2)
    scales = tl.exp(largest - tl.max(largest, 0))
    total = tl.sum(tl.load(partial_stats + parts * 2 + 1) * scales, 0)
    sums = tl.load(partial_sums + parts[:, None] * PADDED_DIM + dims[None, :])
    result = tl.sum(sums * scales[:, None], 0) / total
    target = output + token * output_token_stride + head * output_head_stride
    tl.store(target + dims, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


class TritonBackend(PagedBackend):
    """Attention by our Triton kernels; serves every layer of every step."""

    name = "triton"

    def __init__(self, num_processors: int) -> None:
        """`num_processors`: the device's streaming multiprocessors, which decide the number of key splits."""
        super().__init__()
        self._num_processors = num_processors

    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        """Implements PagedBackend.attend_paged: one kernel, and a second one to join splits."""
        keys, values = self._pools[layer]
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[2]
        num_groups = num_heads // num_kv_heads
        padded_dim = max(_MIN_TILE, triton.next_power_of_2(head_dim))
        num_rows, num_keys = tile_sizes(padded_dim * keys.element_size(), num_groups, step.max_query_len)
        num_sequences = len(step.kv_lens)
        num_splits = num_key_splits(num_sequences * num_kv_heads, step.max_query_len, self._num_processors)
        if query.stride(2) != 1:
            query = query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        sums = stats = output
        if num_splits > 1:
            parts = num_tokens * num_heads * num_splits
            sums = torch.empty(parts * padded_dim, dtype=torch.float32, device=query.device)
            stats = torch.empty(parts * 2, dtype=torch.float32, device=query.device)
        mutual = step.mutual
        num_tiles = triton.cdiv(step.max_query_len, num_rows // num_groups)
        _attend[(num_tiles, num_sequences, num_kv_heads * num_splits)](
            query, keys, values, output, sums, stats,
            group.block_table, group.first_keys, step.query_starts, step.kv_lens,
            step.kv_lens if mutual is None else mutual.starts, step.kv_lens if mutual is None else mutual.stops,
            query.stride(0), query.stride(1), output.stride(0), output.stride(1),
            keys.stride(0), keys.stride(1), keys.stride(2), group.block_table.stride(0),
            options.scale, options.softcap or 0.0, options.window or 0,
            NUM_GROUPS=num_groups, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=keys.shape[1],
            NUM_ROWS=num_rows, NUM_KEYS=num_keys, NUM_SPLITS=num_splits,
            HAS_WINDOW=options.window is not None, HAS_SOFTCAP=options.softcap is not None,
            HAS_MUTUAL=mutual is not None, IS_MUTUAL_BEYOND_WINDOW=mutual is not None and mutual.is_beyond_window,
            num_stages=2,
        )  # fmt: skip
        if num_splits > 1:
            _join[(num_tokens, num_heads)](
                sums, stats, output, output.stride(0), output.stride(1),
                HEAD_DIM=head_dim, PADDED_DIM=padded_dim, NUM_SPLITS=num_splits,
            )  # fmt: skip
        return output


def tile_sizes(key_bytes: int, num_groups: int, max_query_len: int) -> tuple[int, int]:
    """Returns the rows and keys of a program, powers of two for which queries, keys and values fit into shared memory.

    `key_bytes` is the size of one key of one head. Queries and two stages of keys and values take at most 80 KiB.
    """
    least = max(_MIN_TILE, triton.next_power_of_2(num_groups))
    rows = least if max_query_len == 1 else max(least, _CHUNK_ROWS if key_bytes <= 512 else _CHUNK_ROWS // 2)
    keys = 64 if key_bytes <= 128 else 32 if key_bytes <= 256 else 16
    return rows, keys


def num_key_splits(num_programs: int, max_query_len: int, num_processors: int) -> int:
    """Returns the number of parts into which each sequence's keys are divided, a power of two.

    The number does not depend on context lengths, which change between steps. A graph and the same step without one
    therefore add in the same order.
    """
    if max_query_len > 1:
        return 1
    wanted = _PROGRAMS_EACH * num_processors // num_programs
    return min(_MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))
