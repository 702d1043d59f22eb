"""A step's attention metadata as the C++ code reads it: pointers into arrays that live as long as the step."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

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
    first_tokens = _integers(np.cumsum((0, *metadata.query_lens)))
    num_keys = _integers(metadata.kv_lens)
    if not (np.diff(first_tokens) > 0).all() or (num_keys < np.diff(first_tokens)).any():
        raise IndexError("a sequence has no new token, or fewer tokens than new tokens")
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
            struct.groups[index] = _block_group(group, num_keys, first_tokens, num_blocks, sizes.block_size, arrays)
    if any(metadata.mutual_spans):
        starts, stops = _mutual_spans(metadata, first_tokens, num_keys)
        struct.span_starts, struct.span_stops = starts.ctypes.data, stops.ctypes.data
        arrays += [starts, stops]
    return NativeStep(metadata, struct, tuple(arrays))


def _block_group(
    group: BlockMetadata,
    num_keys: IntArray,
    first_tokens: IntArray,
    num_blocks: int,
    block_size: int,
    arrays: list[IntArray],
) -> BlockGroup:
    tables = [table.numpy() for table in group.block_tables]
    slots = _integers(group.slot_mapping.numpy())
    blocks = _integers(np.concatenate(tables))
    lengths = _integers([len(table) for table in tables])
    first_blocks = _integers(np.cumsum(lengths) - lengths)
    first_keys = _integers(group.first_keys)
    if len(slots) != first_tokens[-1]:
        raise IndexError(f"{len(slots)} slots for {first_tokens[-1]} tokens")
    if not 0 <= slots.min() <= slots.max() < num_blocks * block_size:
        raise IndexError(
            f"slots {slots.min()} … {slots.max()} are outside of a pool of {num_blocks * block_size} slots"
        )
    if len(blocks) and not 0 <= blocks.min() <= blocks.max() < num_blocks:
        raise IndexError(f"blocks {blocks.min()} … {blocks.max()} are outside of a pool of {num_blocks} blocks")
    num_kept = num_keys - first_keys
    if (first_keys < 0).any() or (num_kept <= 0).any() or (num_kept > lengths * block_size).any():
        raise IndexError("a sequence has more keys than its blocks hold, or none")
    arrays += [slots, blocks, first_blocks, first_keys]
    return BlockGroup(*(ctypes.c_void_p(array.ctypes.data) for array in (slots, blocks, first_blocks, first_keys)))


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
