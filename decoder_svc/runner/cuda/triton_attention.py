"""Paged attention in Triton: single tokens and chunks, windows, soft caps, mutual spans and latents.

A piece of work is a tile of one sequence's new tokens and the query heads of one key head, as rows of one matrix, and a
part of the keys that any row sees. A program walks over these keys in place (`triton_walks.py`). The parts of long
sequences are joined (Flash-Decoding). The device computes their number (`triton_splits.py`). Nothing is read on the
host, so a step can be recorded as a graph.

The bits of a sequence's result depend on its own queries, keys, values and lengths, on the number of sequences with new
tokens in the step, and on whether the step has prompt chunks and many tokens. They do not depend on other sequences'
contents and lengths, on the order of sequences, on empty ones, or on whether the step is recorded.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.runner.cuda.kernel_steps import MAX_NARROW_TOKENS
from decoder_svc.runner.cuda.paged_backend import LayerPools, PagedBackend
from decoder_svc.runner.cuda.triton_splits import (
    StepShape,
    divided,
    entry,
    join,
    owner,
    partial_counts,
    split_grid,
    starts_of,
)
from decoder_svc.runner.cuda.triton_walks import walk, walk_latents, walk_rounded
from decoder_svc.runner.cuda.triton_writes import write
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep

# Smallest side of a matrix that the matrix units multiply.
_MIN_TILE = 16
# Rows of a program in a step with prompt chunks and many tokens. In a step with few tokens, most sequences have a
# single one, and would leave most of these rows empty.
_CHUNK_ROWS = 64
# Bytes of a tile of keys.
_TILE_BYTES = 16 << 10
# Shared memory that does not depend on the tile.
_OTHER_BYTES = 8 << 10
# 1, and the most tiles of keys and values that are loaded ahead; of 8 bits, tiles have twice as many keys.
_MAX_STAGES, _MAX_ROUNDED_STAGES = 3, 2
# Rows and keys of a program over latents; the first that fit are taken. An H100 multiplies 64 rows asynchronously.
_LATENT_TILES = ((64, 64), (32, 32), (16, 32), (16, 16))
# Numbers of a program's sums from which on its rows are divided among eight warps instead of four.
_WIDE_SUMS = 64 * 256
# Shared memory of a program on devices of compute capability 8.6 and 8.9; others have more.
LEAST_SHARED_BYTES = 99 << 10


@triton.jit
def _seen_keys(
    position, flat_token, is_row, first_key, mutual_starts, mutual_stops, window,
    HAS_WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr, HAS_MUTUAL: tl.constexpr,
    IS_MUTUAL_BEYOND_WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns the keys [start, stop) that each row sees."""
    start = position * 0
    if IS_CHUNKED:
        start = position // window * window
    elif HAS_WINDOW:
        start = position - window + 1
    stop = position + 1
    if HAS_MUTUAL:
        stop = tl.maximum(stop, tl.load(mutual_stops + flat_token, mask=is_row, other=0))
        if IS_MUTUAL_BEYOND_WINDOW:
            start = tl.minimum(start, tl.load(mutual_starts + flat_token, mask=is_row, other=0))
    return tl.maximum(start, first_key), stop


@triton.jit
def _part(begin, end, part, num_parts, NUM_KEYS: tl.constexpr):
    """Returns the keys of one part of [begin, end): whole tiles of keys, except at the end."""
    num_tiles = (end - begin + NUM_KEYS - 1) // NUM_KEYS
    part_len = (num_tiles + num_parts - 1) // num_parts * NUM_KEYS
    begin = begin + part * part_len
    return begin, tl.minimum(end, begin + part_len)


# These numbers differ between steps. A variant for 1 and for multiples of 16 would be compiled while serving.
@triton.jit(do_not_specialize=["table_stride", "num_sequences", "window", "wanted_each"])
def _attend(
    query, keys, values, key_scales, value_scales, output, partial_sums, partial_stats,
    block_table, first_keys, query_starts, kv_lens, mutual_starts, mutual_stops,
    table_stride, num_sequences, wanted_each, scale, softcap, window,
    NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr, PADDED_SEQUENCES: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_MUTUAL: tl.constexpr, IS_MUTUAL_BEYOND_WINDOW: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    """Computes every n-th piece of work. All tensors but the block table are contiguous.

    Where VALUE_DIM is less than HEAD_DIM, values are parts of keys, all heads share one key head, and NUM_KV_HEADS is
    the number of groups that heads are divided into.
    """
    tokens_each: tl.constexpr = NUM_ROWS // NUM_GROUPS
    num_heads: tl.constexpr = NUM_KV_HEADS * NUM_GROUPS
    all_new, all_tiles, all_parts = divided(
        query_starts, kv_lens, first_keys, num_sequences, window, wanted_each, tokens_each, PADDED_SEQUENCES, HAS_WINDOW
    )
    dims = tl.arange(0, PADDED_DIM)
    # Row r is new token r // NUM_GROUPS of the tile, query head r % NUM_GROUPS of the key head.
    rows = tl.arange(0, NUM_ROWS)
    all_pieces = all_tiles * all_parts
    piece_starts, partial_starts = starts_of(all_pieces), starts_of(partial_counts(all_new, all_parts))
    for piece in range(tl.program_id(0), tl.sum(all_pieces, 0) * NUM_KV_HEADS, tl.num_programs(0)):
        is_owner = owner(piece // NUM_KV_HEADS, piece_starts, all_pieces)
        own_piece = piece // NUM_KV_HEADS - entry(is_owner, piece_starts)
        num_parts = entry(is_owner, all_parts)
        sequence = entry(is_owner, tl.arange(0, PADDED_SEQUENCES))
        kv_head = piece % NUM_KV_HEADS
        first_token = tl.load(query_starts + sequence)
        num_new = tl.load(query_starts + sequence + 1) - first_token
        kv_len = tl.load(kv_lens + sequence)
        first_key = tl.load(first_keys + sequence)
        token = own_piece // num_parts * tokens_each + rows // NUM_GROUPS
        head = kv_head * NUM_GROUPS + rows % NUM_GROUPS
        is_row = (rows < tokens_each * NUM_GROUPS) & (token < num_new)
        flat_token = (first_token + token).to(tl.int64)
        start, stop = _seen_keys(
            kv_len - num_new + token, flat_token, is_row, first_key, mutual_starts, mutual_stops, window,
            HAS_WINDOW, IS_CHUNKED, HAS_MUTUAL, IS_MUTUAL_BEYOND_WINDOW,
        )  # fmt: skip
        begin = tl.min(tl.where(is_row, start, kv_len), 0)
        end = tl.max(tl.where(is_row, stop, 0), 0)
        begin, end = _part(begin, end, own_piece % num_parts, num_parts, NUM_KEYS)

        is_stored = is_row[:, None] & (dims < VALUE_DIM)[None, :]
        place = ((flat_token * num_heads + head) * VALUE_DIM)[:, None] + dims[None, :]
        own_query = query + ((flat_token * num_heads + head) * HEAD_DIM)[:, None]
        own_table = block_table + sequence.to(tl.int64) * table_stride
        if IS_ROUNDED:
            half_dim: tl.constexpr = HEAD_DIM // 2
            pairs = tl.arange(0, PADDED_DIM // 2)
            is_pair = is_row[:, None] & (pairs < half_dim)[None, :]
            sums, total, largest = walk_rounded(
                tl.load(own_query + 2 * pairs[None, :], mask=is_pair, other=0.0),
                tl.load(own_query + 2 * pairs[None, :] + 1, mask=is_pair, other=0.0),
                start, stop, begin, end, first_key, keys + kv_head * half_dim, values + kv_head * half_dim,
                key_scales + kv_head, value_scales + kv_head, own_table, scale, softcap,
                NUM_ROWS, NUM_KEYS, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, HAS_SOFTCAP,
            )  # fmt: skip
        elif VALUE_DIM < HEAD_DIM:
            rotary_dims = tl.arange(0, PADDED_ROTARY)
            is_rotary = is_row[:, None] & (rotary_dims < HEAD_DIM - VALUE_DIM)[None, :]
            sums, total, largest = walk_latents(
                tl.load(own_query + dims[None, :], mask=is_stored, other=0.0),
                tl.load(own_query + VALUE_DIM + rotary_dims[None, :], mask=is_rotary, other=0.0),
                start, stop, begin, end, first_key, keys, own_table, scale, softcap,
                NUM_ROWS, NUM_KEYS, HEAD_DIM, VALUE_DIM, PADDED_DIM, PADDED_ROTARY, BLOCK_SIZE, HAS_SOFTCAP,
            )  # fmt: skip
        else:
            queries = tl.load(own_query + dims[None, :], mask=is_stored, other=0.0)
            sums, total, largest = walk(
                queries, start, stop, begin, end, first_key, keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM,
                own_table, scale, softcap,
                NUM_ROWS, NUM_KEYS, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, HAS_SOFTCAP,
            )  # fmt: skip
        if num_parts == 1:
            # Padding rows have a total of 0.
            result = (sums / tl.where(is_row, total, 1.0)[:, None]).to(output.dtype.element_ty)
            tl.store(output + place, result, mask=is_stored)
        else:
            # Partial results are [tokens of divided sequences, heads, parts, …].
            part = (
                (entry(is_owner, partial_starts) + token * num_parts).to(tl.int64) * num_heads
                + head * num_parts
                + own_piece % num_parts
            )
            tl.store(partial_sums + part[:, None] * PADDED_DIM + dims[None, :], sums, mask=is_row[:, None])
            tl.store(partial_stats + part * 2, largest, mask=is_row)
            tl.store(partial_stats + part * 2 + 1, total, mask=is_row)


class TritonBackend(PagedBackend):
    """Attention by our Triton kernels; serves every layer of every step."""

    name = "triton"
    can_round = True

    def __init__(self, num_processors: int, shared_bytes: int = LEAST_SHARED_BYTES) -> None:
        """The device's number of streaming multiprocessors, and the shared memory that a program can have."""
        super().__init__()
        self._num_processors = num_processors
        self._shared_bytes = shared_bytes
        # Scales of keys and of values by layer; empty if the pools are not rounded.
        self._scales: list[tuple[Tensor, Tensor]] = []
        # Sizes of values that are the first elements of keys, by layer.
        self._value_dims: dict[int, int] = {}

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """Makes pools `[blocks, block_size, kv_heads, head_dim]`; rounded ones are int8, with scales beside them."""
        self._scales = []
        value_dims = ((layer, spec.heads(layer).value_dim) for layer in range(spec.num_layers))
        self._value_dims = {layer: size for layer, size in value_dims if size is not None}
        pools = super().allocate(
            replace(spec, dtype=torch.int8) if spec.is_rounded else spec, num_blocks, num_sliding_blocks, device
        )
        if spec.is_rounded:
            self._scales = spec.make_pools(lambda layer: torch.zeros(pools[layer][0].shape[:3], device=device))
        return pools

    def pools_of(self, layer: int) -> LayerPools:
        """Returns the pools of a layer, with their scales."""
        return LayerPools(*self._pools[layer], *self._scales[layer]) if self._scales else super().pools_of(layer)

    def share_pools(self, other: PagedBackend) -> None:
        """Uses the pools of another backend, which are not rounded."""
        super().share_pools(other)
        self._scales, self._value_dims = [], {}

    def _write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        write(key, value, slots, self.pools_of(layer), self._value_dims.get(layer, key.shape[2]))

    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        """Implements PagedBackend.attend_paged: one kernel, and a second one to join parts."""
        pools = self.pools_of(layer)
        num_tokens, num_heads, head_dim = query.shape
        value_dim = self._value_dims.get(layer, head_dim)
        padded_dim = max(2 * _MIN_TILE if pools.is_rounded else _MIN_TILE, triton.next_power_of_2(value_dim))
        padded_rotary = max(_MIN_TILE, triton.next_power_of_2(head_dim - value_dim)) if value_dim < head_dim else 0
        num_counted = 1 if step.max_query_len == 1 else num_tokens
        if padded_rotary:
            assert pools.keys.shape[2] == 1, "heads share one latent"
            sizes = padded_dim, padded_rotary, query.element_size()
            tile = latent_tile_of(*sizes, num_heads, num_counted, self._shared_bytes)
            num_groups = next(each for each in range(tile.num_rows, 0, -1) if num_heads % each == 0)
        else:
            key_bytes, num_groups = padded_dim * query.element_size(), num_heads // pools.keys.shape[2]
            tile = tile_of(key_bytes, num_groups, num_counted, self._shared_bytes, is_rounded=pools.is_rounded)
        num_kv_heads, num_rows = num_heads // num_groups, tile.num_rows
        num_sequences = len(step.kv_lens)
        shape = StepShape(
            num_tokens,
            num_sequences,
            step.max_kv_len,
            num_heads,
            num_kv_heads,
            tokens_each=num_rows // num_groups,
        )
        grid = split_grid(shape, self._num_processors)
        query = query.contiguous()
        output = torch.empty((num_tokens, num_heads, value_dim), dtype=query.dtype, device=query.device)
        sums, stats = (
            torch.empty(grid.num_partials * num_heads * size, dtype=torch.float32, device=query.device)
            for size in (padded_dim, 2)
        )
        lengths = (step.query_starts, step.kv_lens, group.first_keys)
        shared = {
            "PADDED_DIM": padded_dim, "PADDED_SEQUENCES": grid.padded_sequences,
            "HAS_WINDOW": options.window is not None,
        }  # fmt: skip
        window = 0 if options.window is None else options.window.size
        mutual = None if options.is_causal else step.mutual
        _attend[(grid.num_programs,)](
            query, *_read_in_pairs(pools), pools.key_scales, pools.value_scales, output, sums, stats,
            group.block_table, group.first_keys, step.query_starts, step.kv_lens,
            step.kv_lens if mutual is None else mutual.starts, step.kv_lens if mutual is None else mutual.stops,
            group.block_table.stride(0), num_sequences, grid.wanted_each,
            options.scale, options.softcap or 0.0, window,
            NUM_KV_HEADS=num_kv_heads, NUM_GROUPS=num_groups, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
            PADDED_ROTARY=padded_rotary, BLOCK_SIZE=pools.keys.shape[1],
            NUM_ROWS=num_rows, NUM_KEYS=tile.num_keys, HAS_SOFTCAP=options.softcap is not None,
            IS_CHUNKED=options.window is not None and options.window.is_chunked,
            HAS_MUTUAL=mutual is not None, IS_MUTUAL_BEYOND_WINDOW=mutual is not None and mutual.is_beyond_window,
            IS_ROUNDED=pools.is_rounded, num_stages=tile.num_stages, num_warps=tile.num_warps, **shared,
        )  # fmt: skip
        if grid.num_joining:
            join[(grid.num_joining,)](
                sums, stats, output, *lengths, num_sequences, window, grid.wanted_each,
                NUM_HEADS=num_heads, HEAD_DIM=value_dim, TOKENS_EACH=num_rows // num_groups, **shared,
            )  # fmt: skip
        return output


def _read_in_pairs(pools: LayerPools) -> tuple[Tensor, Tensor]:
    """Returns keys and values as the kernel reads them: codes two by two."""
    return tuple(pool.view(torch.int16) if pools.is_rounded else pool for pool in (pools.keys, pools.values))


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the work that a program does at a time."""

    # Rows of queries, and keys; powers of two.
    num_rows: int
    num_keys: int
    # 1, and the number of tiles of keys and values that are loaded ahead.
    num_stages: int
    num_warps: int = 4


def tile_of(key_bytes: int, num_groups: int, num_tokens: int, shared_bytes: int, *, is_rounded: bool = False) -> Tile:
    """Returns a tile that fits into the shared memory of a program; sizes are those that were fastest on an H100.

    `key_bytes` is the size of one key of one head in the type of the queries. A step has `num_tokens` tokens, which
    count as 1 if no sequence has more than one.
    """
    rows = max(_MIN_TILE, triton.next_power_of_2(num_groups))
    if num_tokens > MAX_NARROW_TOKENS:
        rows = max(rows, _CHUNK_ROWS if key_bytes <= 512 else _CHUNK_ROWS // 2)
    # Codes are expanded before they are multiplied, to four times their size in float32.
    stored_bytes = key_bytes // 2 if is_rounded else key_bytes
    keys = max(_MIN_TILE, _TILE_BYTES // stored_bytes)
    # Queries, weights, and the conversion of sums take memory as well.
    left = shared_bytes - 3 * rows * key_bytes - _OTHER_BYTES
    most = _MAX_ROUNDED_STAGES if is_rounded else _MAX_STAGES
    return Tile(rows, keys, num_stages=min(most, max(1, left // (2 * keys * stored_bytes)) + 1))


def latent_tile_of(
    padded_dim: int, padded_rotary: int, element_size: int, num_heads: int, num_tokens: int, shared_bytes: int
) -> Tile:
    """Returns a tile of latents that fits into the shared memory of a program.

    Sizes are those of a latent and of a rotary key, and the bytes of an element. `num_tokens` is that of `tile_of`.
    Rows are at most 64, so that the sums of latents of 512 numbers fit into registers. In float32, whose products do
    not run on matrix units, more than 16 rows and keys do not fit.
    """
    key_bytes = (padded_dim + padded_rotary) * element_size
    most_rows = _CHUNK_ROWS if num_tokens > MAX_NARROW_TOKENS else max(_MIN_TILE, triton.next_power_of_2(num_heads))
    for rows, keys in _LATENT_TILES[:-1] if element_size == 2 else ():
        num_tiles = _latent_tiles(rows, keys, key_bytes, shared_bytes)
        # Two: one is loaded while the other one is multiplied.
        if rows <= most_rows and num_tiles >= 2:
            num_warps = 8 if rows * padded_dim >= _WIDE_SUMS else 4
            # Asynchronous products read a tile until the next one's products begin.
            num_stages = num_tiles if rows == _CHUNK_ROWS else num_tiles + 1
            return Tile(rows, keys, min(_MAX_STAGES, num_stages), num_warps)
    rows, keys = _LATENT_TILES[-1]
    return Tile(rows, keys, min(_MAX_STAGES, max(2, _latent_tiles(rows, keys, key_bytes, shared_bytes) + 1)))


def _latent_tiles(rows: int, keys: int, key_bytes: int, shared_bytes: int) -> int:
    """Returns how many tiles of keys fit beside queries."""
    return (shared_bytes - rows * key_bytes - _OTHER_BYTES) // (keys * key_bytes)
