"""Kernels that store what the functions of `triton_splits.py` return."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from tests.decoder_svc.runner.cuda.interpreted_triton import triton_splits  # isort: skip  # Triton must be found first

import triton
import triton.language as tl

divided, starts_of, owner, entry = (
    triton_splits.divided,
    triton_splits.starts_of,
    triton_splits.owner,
    triton_splits.entry,
)


@triton.jit
def report_division(
    query_starts, kv_lens, first_keys, num_sequences, window, wanted_each, output,
    TOKENS_EACH: tl.constexpr, PADDED_SEQUENCES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Stores new tokens, tiles and parts of each sequence, `[3, PADDED_SEQUENCES]`."""
    num_new, num_tiles, parts = divided(
        query_starts, kv_lens, first_keys, num_sequences, window, wanted_each,
        TOKENS_EACH, PADDED_SEQUENCES, HAS_WINDOW,
    )  # fmt: skip
    places = output + tl.arange(0, PADDED_SEQUENCES)
    tl.store(places, num_new)
    tl.store(places + PADDED_SEQUENCES, num_tiles)
    tl.store(places + 2 * PADDED_SEQUENCES, parts)


@triton.jit
def report_pieces(counts, values, output, PADDED_SEQUENCES: tl.constexpr):
    """Stores sequence, own number and value of each piece, `[number of pieces, 3]`."""
    sequences = tl.arange(0, PADDED_SEQUENCES)
    all_counts, all_values = tl.load(counts + sequences), tl.load(values + sequences)
    starts = starts_of(all_counts)
    for piece in range(tl.sum(all_counts, 0)):
        is_owner = owner(piece, starts, all_counts)
        tl.store(output + piece * 3, entry(is_owner, sequences))
        tl.store(output + piece * 3 + 1, piece - entry(is_owner, starts))
        tl.store(output + piece * 3 + 2, entry(is_owner, all_values))
