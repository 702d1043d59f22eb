"""A step as tensors, for attention that never reads a number on the host.

A recorded graph keeps tensor addresses and freezes every Python number. Everything that differs between steps must
therefore be in these tensors. Sequences follow each other in the flattened batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.runner.input_batch import BlockInputs, FlatInputs
from decoder_svc.runner.state_step import StateStep

# Copies a tensor from host memory to the device.
Move = Callable[[Tensor], Tensor]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PagedBlocks:
    """Positions of a step's tokens in the pools of one group."""

    # Slot (block · block_size + offset) of every token's key and value, int64 [num_tokens].
    slot_mapping: Tensor
    # Blocks of each sequence in token order, int32 [num_sequences, largest number of blocks]; entries behind a
    # sequence's last block are never read.
    block_table: Tensor
    # Index of the token in the first slot of each sequence's first block, int32 [num_sequences].
    first_keys: Tensor


@dataclass(frozen=True, slots=True)
class MutualRanges:
    """The mutual span [start, stop) of every token, int32 [num_tokens] each: all tokens of a span see each other.

    A token outside of any span has a span of one token, itself.
    """

    starts: Tensor
    stops: Tensor
    # Whether tokens of a span see each other beyond the layer's window, too.
    is_beyond_window: bool


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The sequences of one step."""

    # Blocks of the full group.
    full: PagedBlocks
    # Blocks of the sliding group; None for a model without one.
    sliding: PagedBlocks | None
    # Index of each sequence's first new token, and the number of tokens at the end; int32 [num_sequences + 1].
    query_starts: Tensor
    # Tokens of each sequence including the new ones, int32 [num_sequences].
    kv_lens: Tensor
    # None if no token of the step sees a later one.
    mutual: MutualRanges | None
    # Upper bounds for every step that uses these tensors: new tokens, and all tokens, of one sequence.
    max_query_len: int
    max_kv_len: int
    # States of recurrent layers; None for a model without such layers.
    states: StateStep | None = None


def paged_step(inputs: FlatInputs, move: Move, *, is_mutual_beyond_window: bool) -> PagedStep:
    """Returns flattened inputs as a step whose tensors are on the device."""
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
    starts, stops = mutual_bounds(inputs)
    return MutualRanges(_int32(starts, move), _int32(stops, move), is_beyond_window)


def mutual_bounds(inputs: FlatInputs) -> tuple[Int32Array, Int32Array]:
    """Returns the bounds of `MutualRanges` for every token of a step; any step may be without spans."""
    firsts = [kv_len - length for kv_len, length in zip(inputs.kv_lens, inputs.query_lens, strict=True)]
    starts = np.concatenate(
        [np.arange(first, stop) for first, stop in zip(firsts, inputs.kv_lens, strict=True)], dtype=np.int32
    )
    stops = starts + np.int32(1)
    begin = 0
    for first, length, spans in zip(firsts, inputs.query_lens, inputs.mutual_spans, strict=True):
        for span in spans:
            inside = slice(begin + max(0, span.offset - first), begin + min(length, span.stop - first))
            starts[inside], stops[inside] = span.offset, span.stop
        begin += length
    return starts, stops


def _int32(values: npt.ArrayLike, move: Move) -> Tensor:
    return move(torch.from_numpy(np.asarray(values, dtype=np.int32)))
