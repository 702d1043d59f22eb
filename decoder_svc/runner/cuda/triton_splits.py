"""Division of a step's attention into programs of similar length, computed on the device from the sequences' lengths.

A piece of work is one tile of a sequence's new tokens and one part of the keys that the tile sees. Long sequences have
more parts. The number of programs is fixed, and each takes every n-th piece, so a recorded graph fits any lengths.

The number of a sequence's parts depends on four numbers: its own length, its own new tokens, how many sequences have
new tokens in the step, and the device's number of multiprocessors. It does not depend on the lengths of other sequences
or on sequences without new tokens.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

# Programs per multiprocessor. Two fit at the same time on an H100.
_PROGRAMS_EACH = 2
# Keys of a part if a few sequences share the device, and if sequences alone give every multiprocessor enough work.
_MIN_PART_KEYS = tl.constexpr(128)
_MAX_PART_KEYS = tl.constexpr(1024)
_MAX_PARTS = tl.constexpr(128)
# Partial results of a step, counted per head: at most this many, or one part per sequence. Bounds their memory.
_MAX_PARTIALS = tl.constexpr(4096)
# Parts that are joined at a time.
_JOINED = tl.constexpr(16)
# Programs per multiprocessor that join parts. They are small.
_JOINING_EACH = 8
# Lengths of this many sequences are read at once. More sequences need another variant of the kernels.
_NUM_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step, known on the host."""

    num_tokens: int
    num_sequences: int
    # Upper bound of a sequence's tokens.
    max_kv_len: int
    num_heads: int
    num_kv_heads: int
    # Tokens of a tile.
    tokens_each: int


@dataclass(frozen=True, slots=True)
class SplitGrid:
    """Numbers of programs of a step, and the size of its partial results."""

    # Programs that attend.
    num_programs: int
    # Programs of one key head among which keys are divided. 1: keys are never divided.
    wanted_each: int
    # Room for partial results of one head. It does not depend on lengths, so a measurement of memory with short
    # sequences holds for long ones.
    num_partials: int
    # Programs that join partial results; 0 if no sequence can be long enough to be divided.
    num_joining: int
    # Number of sequences, rounded up to a power of two.
    padded_sequences: int


def split_grid(shape: StepShape, num_processors: int) -> SplitGrid:
    """Returns the grid for steps of this shape."""
    filling = _PROGRAMS_EACH * num_processors
    wanted_each = max(1, num_processors // shape.num_kv_heads)
    max_parts = min(wanted_each, _MAX_PARTS.value)
    possible_parts = min(max_parts, triton.cdiv(shape.max_kv_len, _MIN_PART_KEYS.value))
    # Each sequence has less than one tile that is not full.
    num_tiles = shape.num_tokens // shape.tokens_each + shape.num_sequences
    num_pairs = shape.num_tokens * shape.num_heads if possible_parts > 1 else 0
    return SplitGrid(
        num_programs=min(filling, num_tiles * possible_parts * shape.num_kv_heads),
        wanted_each=wanted_each,
        num_partials=min(_MAX_PARTIALS.value, shape.num_tokens * max_parts) if max_parts > 1 else 0,
        num_joining=min(_JOINING_EACH * num_processors, num_pairs),
        padded_sequences=triton.next_power_of_2(max(shape.num_sequences, _NUM_SEQUENCES)),
    )


@triton.jit
def divided(
    query_starts, kv_lens, first_keys, num_sequences, window, wanted_each,
    TOKENS_EACH: tl.constexpr, PADDED_SEQUENCES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns per sequence the numbers of new tokens, of tiles, and of parts of each tile's keys."""
    sequences = tl.arange(0, PADDED_SEQUENCES)
    is_sequence = sequences < num_sequences
    first_token = tl.load(query_starts + sequences, mask=is_sequence, other=0)
    num_new = tl.load(query_starts + sequences + 1, mask=is_sequence, other=0) - first_token
    num_seen = tl.load(kv_lens + sequences, mask=is_sequence, other=0)
    num_seen -= tl.load(first_keys + sequences, mask=is_sequence, other=0)
    if HAS_WINDOW:
        num_seen = tl.minimum(num_seen, window + num_new)
    num_tiles = (num_new + TOKENS_EACH - 1) // TOKENS_EACH
    num_active = tl.maximum(tl.sum((num_new > 0).to(tl.int32), 0), 1)
    part_keys = tl.minimum(tl.maximum(num_active * _MAX_PART_KEYS // wanted_each, _MIN_PART_KEYS), _MAX_PART_KEYS)
    parts = tl.minimum((num_seen + part_keys - 1) // part_keys, _MAX_PARTS)
    # Tiles of a chunk run beside each other already.
    parts = tl.minimum(parts, wanted_each // tl.maximum(num_tiles, 1))
    parts = tl.minimum(parts, tl.full([], _MAX_PARTIALS, tl.int32) // num_active // tl.maximum(num_new, 1))
    return num_new, num_tiles, tl.maximum(parts, 1)


@triton.jit
def starts_of(counts):
    """Returns per sequence the sum of the counts before it."""
    return tl.cumsum(counts, 0) - counts


@triton.jit
def owner(place, starts, counts):
    """Returns per sequence whether it has piece number `place`, given the starts and counts of pieces."""
    return (place >= starts) & (place < starts + counts)


@triton.jit
def entry(is_owner, values):
    """Returns the owner's entry of `values`."""
    return tl.sum(tl.where(is_owner, values, 0), 0)


@triton.jit
def partial_counts(num_new, parts):
    """Returns per sequence the number of its partial results, per head."""
    return tl.where(parts > 1, num_new * parts, 0)


@triton.jit(do_not_specialize=["num_sequences", "window", "wanted_each"])
def join(
    partial_sums, partial_stats, output, query_starts, kv_lens, first_keys, num_sequences, window, wanted_each,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TOKENS_EACH: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Joins the parts of every token and head of sequences that have several. Each program takes every n-th pair.

    `output` is `[num_tokens, heads, head_dim]`. A part without keys has the sum 0 and the maximum -inf.
    """
    num_new, _, parts = divided(
        query_starts, kv_lens, first_keys, num_sequences, window, wanted_each,
        TOKENS_EACH, PADDED_SEQUENCES, HAS_WINDOW,
    )  # fmt: skip
    counts = tl.where(parts > 1, num_new, 0)
    starts, partial_starts = starts_of(counts), starts_of(partial_counts(num_new, parts))
    sequences = tl.arange(0, PADDED_SEQUENCES)
    dims = tl.arange(0, PADDED_DIM)
    each = tl.arange(0, _MAX_PARTS)
    for pair in range(tl.program_id(0), tl.sum(counts, 0) * NUM_HEADS, tl.num_programs(0)):
        is_owner = owner(pair // NUM_HEADS, starts, counts)
        token = pair // NUM_HEADS - entry(is_owner, starts)
        num_parts = entry(is_owner, parts)
        head = pair % NUM_HEADS
        start = entry(is_owner, partial_starts) + token * num_parts
        first = start.to(tl.int64) * NUM_HEADS + head * num_parts
        largest = tl.max(
            tl.load(partial_stats + (first + each) * 2, mask=each < num_parts, other=float("-inf")), 0
        )  # fmt: skip
        result = tl.full([PADDED_DIM], 0.0, tl.float32)
        total = 0.0
        for begin in range(0, num_parts, _JOINED):
            part = begin + tl.arange(0, _JOINED)
            place = first + part
            is_part = part < num_parts
            scales = tl.exp(tl.load(partial_stats + place * 2, mask=is_part, other=float("-inf")) - largest)
            total += tl.sum(tl.load(partial_stats + place * 2 + 1, mask=is_part, other=0.0) * scales, 0)
            sums = tl.load(partial_sums + place[:, None] * PADDED_DIM + dims[None, :], mask=is_part[:, None], other=0.0)
            result += tl.sum(sums * scales[:, None], 0)
        flat_token = (tl.load(query_starts + entry(is_owner, sequences)) + token).to(tl.int64)
        target = output + (flat_token * NUM_HEADS + head) * HEAD_DIM + dims
        tl.store(target, (result / total).to(output.dtype.element_ty), mask=dims < HEAD_DIM)
