"""A step's attention metadata as the C++ code reads it: pointers into arrays that live as long as the step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata
from decoder_svc.runner.cpu.native_structures import BlockGroup, Step

IntArray = npt.NDArray[np.int64]
# Size of an int64.
_ITEM_BYTES = 8


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Sizes of the pools, against which indexes are checked."""

    block_size: int
    # Blocks of the full group and of the sliding group.
    num_blocks: int
    num_sliding_blocks: int


@dataclass(frozen=True, slots=True)
class NativeStep:
    """The C++ structure of a step, shared by all its layers."""

    metadata: AttentionMetadata
    struct: Step
    # Arrays that `struct` points into; they must stay alive with it.
    arrays: tuple[object, ...]


def native_step(metadata: AttentionMetadata, sizes: PoolSizes, num_threads: int) -> NativeStep:
    """Builds the C++ structure of a step.

    Raises IndexError if a slot or block is outside of the pools: the C++ code checks no bounds.
    """
    query_lens, kv_lens = metadata.query_lens, metadata.kv_lens
    if not all(0 < num_new <= num_tokens for num_new, num_tokens in zip(query_lens, kv_lens, strict=True)):
        raise IndexError("a sequence has no new token, or fewer tokens than new tokens")
    num_sequences = len(kv_lens)
    groups: list[_Group | None] = []
    for group, num_blocks in ((metadata.full, sizes.num_blocks), (metadata.sliding, sizes.num_sliding_blocks)):
        groups.append(None if group is None else _checked_group(group, metadata, num_blocks, sizes.block_size))
    # One array of all numbers that there is one of for each sequence: each array takes some microseconds.
    numbers = array("q", accumulate(query_lens, initial=0))
    num_tokens = numbers[-1]
    numbers.extend(kv_lens)
    for part in groups:
        if part is not None:
            numbers.extend(part.first_blocks)
            numbers.extend(part.first_keys)
    address = numbers.buffer_info()[0]
    struct = Step(
        first_tokens=address,
        num_keys=address + (num_sequences + 1) * _ITEM_BYTES,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        is_mutual_beyond_window=int(metadata.is_mutual_beyond_window),
        num_threads=num_threads,
    )
    arrays: list[object] = [numbers]
    address += (2 * num_sequences + 1) * _ITEM_BYTES
    for index, part in enumerate(groups):
        if part is not None:
            first_keys = address + num_sequences * _ITEM_BYTES
            struct.groups[index] = BlockGroup(part.slots.data_ptr(), part.blocks.data_ptr(), address, first_keys)
            address = first_keys + num_sequences * _ITEM_BYTES
            arrays += (part.slots, part.blocks)
    if any(metadata.mutual_spans):
        starts, stops = _mutual_spans(metadata, np.array(numbers[: num_sequences + 1]), np.array(kv_lens))
        struct.span_starts, struct.span_stops = starts.ctypes.data, stops.ctypes.data
        arrays += (starts, stops)
    return NativeStep(metadata, struct, tuple(arrays))


class _Group(NamedTuple):
    """Positions of a step's tokens in the pools of one group; `BlockGroup` points to them."""

    # int64, of all tokens, and of all sequences one after the other.
    slots: Tensor
    blocks: Tensor
    # For each sequence.
    first_blocks: Sequence[int]
    first_keys: Sequence[int]


def _checked_group(group: BlockMetadata, metadata: AttentionMetadata, num_blocks: int, block_size: int) -> _Group:
    slots, tables = group.slot_mapping.contiguous(), group.block_tables
    blocks = tables[0].contiguous() if len(tables) == 1 else torch.cat(tables)
    assert slots.dtype is blocks.dtype is torch.int64, "the C++ code reads int64"
    lengths = [len(table) for table in tables]
    num_tokens = sum(metadata.query_lens)
    if len(slots) != num_tokens:
        raise IndexError(f"{len(slots)} slots for {num_tokens} tokens")
    if not are_below(slots.numpy(), num_blocks * block_size):
        raise IndexError(
            f"slots {slots.min()} … {slots.max()} are outside of a pool of {num_blocks * block_size} slots"
        )
    if not are_below(blocks.numpy(), num_blocks):
        raise IndexError(f"blocks {blocks.min()} … {blocks.max()} are outside of a pool of {num_blocks} blocks")
    kept = zip(group.first_keys, metadata.kv_lens, lengths, strict=True)
    if not all(0 <= first < keys <= first + length * block_size for first, keys, length in kept):
        raise IndexError("a sequence has more keys than its blocks hold, or none")
    return _Group(slots, blocks, [*accumulate(lengths[:-1], initial=0)], group.first_keys)


def are_below(indexes: IntArray, stop: int) -> bool:
    """Whether all are from 0 to `stop` - 1. As unsigned numbers, negative ones are the largest."""
    return not len(indexes) or bool(np.maximum.reduce(indexes.view(np.uint64)) < stop)


def _mutual_spans(metadata: AttentionMetadata, first_tokens: IntArray, num_keys: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the span [start, stop) of each new token, as token indexes in its sequence; empty if it has none."""
    starts, stops = np.zeros((2, int(first_tokens[-1])), dtype=np.int64)
    # Then tokens see the whole span, and not the part of it in their window alone.
    is_kept_whole = metadata.is_mutual_beyond_window and metadata.sliding is not None
    first_keys = metadata.sliding.first_keys if metadata.sliding is not None else ()
    for index, spans in enumerate(metadata.mutual_spans):
        begin, end = int(first_tokens[index]), int(first_tokens[index + 1])
        first = int(num_keys[index]) - (end - begin)
        for span in spans:
            if span.stop > num_keys[index]:
                raise IndexError("a span ends after its sequence's last token")
            if is_kept_whole and span.stop > first and span.offset < first_keys[index]:
                raise IndexError("a span begins before the keys that its sequence has")
            inside = slice(begin + max(0, span.offset - first), begin + max(0, min(end - begin, span.stop - first)))
            starts[inside], stops[inside] = span.offset, span.stop
    return starts, stops
