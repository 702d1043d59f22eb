"""A step's attention metadata as the C++ code reads it: pointers into arrays that live as long as the step."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata
from decoder_svc.runner.cpu.native_structures import BlockGroup, Step

IntArray = npt.NDArray[np.int64]


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
    arrays: tuple[IntArray, ...]


def native_step(metadata: AttentionMetadata, sizes: PoolSizes, num_threads: int) -> NativeStep:
    """Builds the C++ structure of a step.

    Raises IndexError if a slot or block is outside of the pools: the C++ code checks no bounds.
    """
    lengths = zip(metadata.query_lens, metadata.kv_lens, strict=True)
    if not all(0 < num_new <= num_tokens for num_new, num_tokens in lengths):
        raise IndexError("a sequence has no new token, or fewer tokens than new tokens")
    first_tokens = _integers([*accumulate(metadata.query_lens, initial=0)])
    num_keys = _integers(metadata.kv_lens)
    arrays = [first_tokens, num_keys]
    struct = Step(
        first_tokens=first_tokens.ctypes.data,
        num_keys=num_keys.ctypes.data,
        num_sequences=len(num_keys),
        num_tokens=int(first_tokens[-1]),
        is_mutual_beyond_window=int(metadata.is_mutual_beyond_window),
        num_threads=num_threads,
    )
    groups = ((metadata.full, sizes.num_blocks), (metadata.sliding, sizes.num_sliding_blocks))
    for index, (group, num_blocks) in enumerate(groups):
        if group is not None:
            struct.groups[index] = _block_group(group, metadata, num_blocks, sizes.block_size, arrays)
    if any(metadata.mutual_spans):
        starts, stops = _mutual_spans(metadata, first_tokens, num_keys)
        struct.span_starts, struct.span_stops = starts.ctypes.data, stops.ctypes.data
        arrays += [starts, stops]
    return NativeStep(metadata, struct, tuple(arrays))


def _block_group(
    group: BlockMetadata,
    metadata: AttentionMetadata,
    num_blocks: int,
    block_size: int,
    arrays: list[IntArray],
) -> BlockGroup:
    tables = [table.numpy() for table in group.block_tables]
    slots = _integers(group.slot_mapping.numpy())
    blocks = _integers(np.concatenate(tables))
    lengths = [len(table) for table in tables]
    num_tokens = sum(metadata.query_lens)
    if len(slots) != num_tokens:
        raise IndexError(f"{len(slots)} slots for {num_tokens} tokens")
    if not _are_below(slots, num_blocks * block_size):
        raise IndexError(
            f"slots {slots.min()} … {slots.max()} are outside of a pool of {num_blocks * block_size} slots"
        )
    if not _are_below(blocks, num_blocks):
        raise IndexError(f"blocks {blocks.min()} … {blocks.max()} are outside of a pool of {num_blocks} blocks")
    kept = zip(group.first_keys, metadata.kv_lens, lengths, strict=True)
    if not all(0 <= first < keys <= first + length * block_size for first, keys, length in kept):
        raise IndexError("a sequence has more keys than its blocks hold, or none")
    first_blocks = _integers([*accumulate(lengths[:-1], initial=0)])
    first_keys = _integers(group.first_keys)
    arrays += [slots, blocks, first_blocks, first_keys]
    return BlockGroup(*(ctypes.c_void_p(array.ctypes.data) for array in (slots, blocks, first_blocks, first_keys)))


def _are_below(indexes: IntArray, stop: int) -> bool:
    """Whether all are from 0 to `stop` - 1. As unsigned numbers, negative ones are the largest."""
    return bool(np.maximum.reduce(indexes.view(np.uint64), initial=0) < stop) or not len(indexes)


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


def _integers(values: npt.ArrayLike) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int64)
