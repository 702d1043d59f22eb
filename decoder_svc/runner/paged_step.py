"""A step as tensors alone, for attention that runs on a device: what a recorded graph may read, and nothing else.

A graph keeps the addresses of what it was recorded with and forgets every Python number, so that all that differs from
step to step stands in these tensors. Sequences follow each other in the flattened batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.runner.input_batch import BlockInputs, FlatInputs

# From host memory to the device.
Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class PagedBlocks:
    """Where the tokens of a step lie in the pools of one group."""

    # Slot (block · block_size + offset) of every token's key and value, int64 [num_tokens].
    slot_mapping: Tensor
    # Blocks of each sequence in token order, int32 [num_sequences, most blocks of one]; what stands behind the last
    # block of a sequence is never followed.
    block_table: Tensor
    # The token in the first slot of each sequence's first block, int32 [num_sequences].
    first_keys: Tensor


@dataclass(frozen=True, slots=True)
class MutualRanges:
    """Of every token: the stretch of tokens that all see each other and that it is in, int32 [num_tokens] each.

    A token that is in none has a stretch of its own, itself.
    """

    starts: Tensor
    stops: Tensor
    # Whether they see each other where the layer's window ends, too.
    is_beyond_window: bool


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The sequences of one step."""

    # For the layers that see everything, or all.
    full: PagedBlocks
    # For the layers of the sliding group, where there is one.
    sliding: PagedBlocks | None
    # Index of each sequence's first new token, and the number of tokens at the end; int32 [num_sequences + 1].
    query_starts: Tensor
    # Tokens of each sequence including the new ones, int32 [num_sequences].
    kv_lens: Tensor
    # None where no token of the step sees one behind it.
    mutual: MutualRanges | None
    # Upper bounds that hold whenever these tensors are read: New tokens of a sequence, and all tokens of it.
    max_query_len: int
    max_kv_len: int


def paged_step(inputs: FlatInputs, move: Move, *, is_mutual_beyond_window: bool) -> PagedStep:
    """The step of flattened inputs, its tensors on the device."""
    query_starts = np.cumsum((0, *inputs.query_lens))
    return PagedStep(
        full=_paged_blocks(inputs.full, move),
        sliding=None if inputs.sliding is None else _paged_blocks(inputs.sliding, move),
        query_starts=_int32(query_starts, move),
        kv_lens=_int32(inputs.kv_lens, move),
        mutual=_mutual_ranges(inputs, move, is_beyond_window=is_mutual_beyond_window),
        max_query_len=max(inputs.query_lens),
        max_kv_len=max(inputs.kv_lens),
    )


def _paged_blocks(inputs: BlockInputs, move: Move) -> PagedBlocks:
    table = np.zeros((len(inputs.block_tables), max(map(len, inputs.block_tables))), dtype=np.int32)
    for row, blocks in zip(table, inputs.block_tables, strict=True):
        row[: len(blocks)] = blocks
    return PagedBlocks(
        slot_mapping=move(torch.from_numpy(inputs.slot_mapping)),
        block_table=_int32(table, move),
        first_keys=_int32(inputs.first_tokens, move),
    )


def _mutual_ranges(inputs: FlatInputs, move: Move, *, is_beyond_window: bool) -> MutualRanges | None:
    if not any(inputs.mutual_spans):
        return None
    firsts = [kv_len - length for kv_len, length in zip(inputs.kv_lens, inputs.query_lens, strict=True)]
    starts = np.concatenate(
        [np.arange(first, stop) for first, stop in zip(firsts, inputs.kv_lens, strict=True)], dtype=np.int32
    )
    stops = starts + 1
    begin = 0
    for first, length, spans in zip(firsts, inputs.query_lens, inputs.mutual_spans, strict=True):
        for span in spans:
            inside = slice(begin + max(0, span.offset - first), begin + min(length, span.stop - first))
            starts[inside], stops[inside] = span.offset, span.stop
        begin += length
    return MutualRanges(_int32(starts, move), _int32(stops, move), is_beyond_window)


def _int32(values: npt.ArrayLike, move: Move) -> Tensor:
    return move(torch.from_numpy(np.asarray(values, dtype=np.int32)))
