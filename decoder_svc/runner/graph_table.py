"""Decode passes at fixed batch sizes, recorded once into graphs and replayed with other numbers.

A graph reads and writes the memory that it was recorded with. All graphs therefore share one set of input tensors, and
each uses the first rows of it. A step's numbers are copied there. Left-over rows are padding: they write to the block
that nobody reads, see only themselves, and their results are dropped.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.runner.paged_step import PagedBlocks, PagedStep

# Records a function that reads and writes tensors in place; returns a function that replays it. The next replay
# overwrites the result of the last one.
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]

_SMALL_SIZES = (1, 2, 4)
_STEP = 8


def graph_batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns 1, 2, 4 and then multiples of 8, up to the first that holds `max_num_seqs`.

    A step is padded by less than 8 tokens.
    """
    sizes: list[int] = []
    for size in itertools.chain(_SMALL_SIZES, itertools.count(_STEP, _STEP)):
        sizes.append(size)
        if size >= max_num_seqs:
            break
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode pass: one token of each of `num_tokens` sequences."""

    # [num_tokens, hidden_size].
    embeddings: Tensor
    # [num_axes, num_tokens].
    positions: Tensor
    step: PagedStep


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Limits of one group's pool that graphs are recorded with."""

    # Blocks of the longest possible sequence: the width of a block table.
    max_blocks: int
    # The block that nobody reads; padding is written there.
    unread_block: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shapes that the tensors of every step share."""

    hidden_size: int
    dtype: torch.dtype
    num_position_axes: int
    block_size: int
    full: PoolShape
    # None for a model without a sliding group.
    sliding: PoolShape | None


class GraphTable:
    """Recorded graphs by batch size, and the input tensors that they share."""

    def __init__(self, sizes: Iterable[int], shape: StepShape, device: torch.device) -> None:
        self.sizes = tuple(sorted(sizes))
        self._shape = shape
        self._static = _padding(self.sizes[-1], shape, device)
        self._padding = _padding(self.sizes[-1], shape, device)
        self._replays: dict[int, Callable[[], Tensor]] = {}

    def capture(self, forward: Callable[[DecodeInputs], Tensor], record: Record) -> None:
        """Records `forward` at every size, largest first, so that smaller graphs reuse the largest one's memory."""
        for size in reversed(self.sizes):
            self._replays[size] = record(functools.partial(forward, _first(self._static, size)))

    def size_for(self, num_tokens: int) -> int | None:
        """Returns the smallest recorded size that holds `num_tokens`; None if all are smaller."""
        return next((size for size in self.sizes if size >= num_tokens), None)

    def fill(self, inputs: DecodeInputs, size: int) -> DecodeInputs:
        """Copies a step's numbers into the input tensors of the graph of this size; returns those tensors."""
        num_tokens = len(inputs.embeddings)
        for target, source in zip(_tensors(self._static), _tensors(inputs), strict=True):
            # A step's block table is only as wide as its longest sequence needs.
            target[: source.shape[0], : source.shape[1]].copy_(source)
        if num_tokens < size:
            for target, source in zip(_tensors(self._static), _tensors(self._padding), strict=True):
                target[num_tokens:size].copy_(source[num_tokens:size])
        return _first(self._static, size)

    def replay(self, inputs: DecodeInputs, size: int) -> Tensor:
        """Returns the result for a step's tokens, `[num_tokens, …]`. The next replay overwrites it."""
        self.fill(inputs, size)
        return self._replays[size]()[: len(inputs.embeddings)]


def _padding(size: int, shape: StepShape, device: torch.device) -> DecodeInputs:
    """Returns the tensors of the largest step, filled with padding."""

    def blocks(pool: PoolShape) -> PagedBlocks:
        unread_slot = pool.unread_block * shape.block_size
        return PagedBlocks(
            slot_mapping=torch.full((size,), unread_slot, dtype=torch.int64, device=device),
            block_table=torch.full((size, pool.max_blocks), pool.unread_block, dtype=torch.int32, device=device),
            first_keys=torch.zeros(size, dtype=torch.int32, device=device),
        )

    step = PagedStep(
        full=blocks(shape.full),
        sliding=None if shape.sliding is None else blocks(shape.sliding),
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        kv_lens=torch.ones(size, dtype=torch.int32, device=device),
        mutual=None,
        max_query_len=1,
        max_kv_len=shape.full.max_blocks * shape.block_size,
    )
    embeddings = torch.zeros(size, shape.hidden_size, dtype=shape.dtype, device=device)
    positions = torch.zeros(shape.num_position_axes, size, dtype=torch.int64, device=device)
    return DecodeInputs(embeddings, positions, step)


def _first(inputs: DecodeInputs, size: int) -> DecodeInputs:
    """Returns a view of the first `size` tokens, in the same memory."""

    def blocks(group: PagedBlocks) -> PagedBlocks:
        return PagedBlocks(group.slot_mapping[:size], group.block_table[:size], group.first_keys[:size])

    step = inputs.step
    return DecodeInputs(
        inputs.embeddings[:size],
        inputs.positions[:, :size],
        PagedStep(
            full=blocks(step.full),
            sliding=None if step.sliding is None else blocks(step.sliding),
            query_starts=step.query_starts[: size + 1],
            kv_lens=step.kv_lens[:size],
            mutual=None,
            max_query_len=step.max_query_len,
            max_kv_len=step.max_kv_len,
        ),
    )


def _tensors(inputs: DecodeInputs) -> list[Tensor]:
    """Returns all tensors that differ between steps, each `[num_tokens, …]` in two dimensions, in a fixed order."""
    step = inputs.step
    groups = [step.full] if step.sliding is None else [step.full, step.sliding]
    return [
        inputs.embeddings,
        inputs.positions.T,
        step.kv_lens[:, None],
        *(group.slot_mapping[:, None] for group in groups),
        *(group.block_table for group in groups),
        *(group.first_keys[:, None] for group in groups),
    ]
