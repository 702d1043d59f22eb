"""Decode passes at fixed batch sizes, recorded once into graphs and replayed with other numbers.

A graph reads and writes the memory that it was recorded with. All graphs therefore share one set of input tensors, and
each uses the first rows of it. They are parts of one buffer, so a step's numbers reach them in one copy. Left-over rows
are padding: they write to the block that nobody reads, see only themselves, and their results are dropped.

Block tables stay on the device from step to step. A step brings only the entries that changed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.input_batch import BlockInputs, FlatInputs
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep

_SMALL_SIZES = (1, 2, 4)
_STEP = 8
# Entries of a block table that a step may change without copying it: a token starts at most one block.
_CHANGES_PER_TOKEN = 2
_ALIGNMENT = 16


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
class TableChanges:
    """New entries of a group's block table; entries past the last change are written to a place that nobody reads."""

    # The whole table with that place behind it, int32 [largest size · max_blocks + 1].
    entries: Tensor
    # Indexes into `entries`, int64, and their blocks, int32; [number of changes].
    places: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode pass: one token of each of `num_tokens` sequences."""

    # [num_tokens].
    token_ids: Tensor
    # [num_axes, num_tokens].
    positions: Tensor
    step: PagedStep
    # To be applied before the pass.
    changes: tuple[TableChanges, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Results of a decode pass."""

    # [num_tokens, vocab].
    logits: Tensor
    # Ids of the largest logits, [num_tokens].
    likeliest: Tensor


# Records a function that reads and writes tensors in place; returns a function that replays it. The next replay
# overwrites the result of the last one.
Record = Callable[[Callable[[], Decoded]], Callable[[], Decoded]]


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

    num_position_axes: int
    block_size: int
    full: PoolShape
    # None for a model without a sliding group.
    sliding: PoolShape | None

    @property
    def pools(self) -> tuple[PoolShape, ...]:
        """The full group's limits, and the sliding group's if there is one."""
        return (self.full,) if self.sliding is None else (self.full, self.sliding)


class GraphTable:
    """Recorded graphs by batch size, and the input tensors that they share."""

    def __init__(self, sizes: Iterable[int], shape: StepShape, transfer: HostTransfer) -> None:
        self.sizes = tuple(sorted(sizes))
        self._shape = shape
        self._transfer = transfer
        size, device = self.sizes[-1], transfer.device
        self._specs = _specs(size, shape)
        self._buffer = torch.zeros(sum(map(_num_bytes, self._specs)), dtype=torch.uint8, device=device)
        self._tables = [_Table(size, pool, device) for pool in shape.pools]
        self._query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._replays: dict[int, Callable[[], Decoded]] = {}

    def capture(self, forward: Callable[[DecodeInputs], Decoded], record: Record) -> None:
        """Records `forward` at every size, largest first, so that smaller graphs reuse the largest one's memory."""
        for size in reversed(self.sizes):
            self._replays[size] = record(functools.partial(forward, self.fill(None, size)))

    def size_for(self, num_tokens: int) -> int | None:
        """Returns the smallest recorded size that holds `num_tokens`; None if all are smaller."""
        return next((size for size in self.sizes if size >= num_tokens), None)

    def fill(self, flat: FlatInputs | None, size: int) -> DecodeInputs:
        """Copies a step's numbers into the input tensors of the graph of this size; returns those tensors.

        Every request of the step has one token. None stands for a step without requests: padding alone. Raises
        ValueError if a block table is wider than the tables of graphs.
        """
        staged = self._transfer.staging(len(self._buffer))
        token_ids, positions, kv_lens, *groups = (part.numpy() for part in _carved(staged, self._specs))
        inputs: Sequence[BlockInputs | None] = [None] * len(self._tables)
        num_tokens = 0
        if flat is not None:
            inputs = [flat.full, flat.sliding]
            num_tokens = len(flat.token_ids)
            token_ids[:num_tokens] = flat.token_ids
            positions[:, :num_tokens] = flat.positions
            kv_lens[:num_tokens] = flat.kv_lens
        token_ids[num_tokens:], positions[:, num_tokens:], kv_lens[num_tokens:] = 0, 0, 1
        for index, table in enumerate(self._tables):
            targets = groups[index * _PARTS_PER_GROUP :][:_PARTS_PER_GROUP]
            self._fill_group(inputs[index], table, targets, size)
        self._transfer.copy(staged, self._buffer)
        return self._inputs(size)

    def _fill_group(
        self, inputs: BlockInputs | None, table: _Table, targets: Sequence[npt.NDArray[np.int64]], size: int
    ) -> None:
        slot_mapping, changed, first_keys, blocks = targets
        tables = () if inputs is None else inputs.block_tables
        if inputs is not None:
            slot_mapping[: len(tables)], first_keys[: len(tables)] = inputs.slot_mapping, inputs.first_tokens
        slot_mapping[len(tables) :], first_keys[len(tables) :] = table.unread_block * self._shape.block_size, 0
        places, new = table.changes(tables, size)
        if len(places) > len(changed):
            table.replace(self._transfer)
            places = places[:0]
        changed[: len(places)], changed[len(places) :] = places, table.unread_place
        blocks[: len(places)], blocks[len(places) :] = new[: len(places)], table.unread_block

    def replay(self, flat: FlatInputs, size: int, feed: Callable[[Tensor], None] | None = None) -> Decoded:
        """Returns the results for a step's tokens. The next replay overwrites them.

        `feed` writes ids that only the device has into the step's token ids.
        """
        inputs = self.fill(flat, size)
        if feed is not None:
            feed(inputs.token_ids)
        decoded = self._replays[size]()
        num_tokens = len(flat.token_ids)
        return Decoded(decoded.logits[:num_tokens], decoded.likeliest[:num_tokens])

    def _inputs(self, size: int) -> DecodeInputs:
        """Returns the first `size` tokens of the input tensors."""
        token_ids, positions, kv_lens, *parts = _carved(self._buffer, self._specs)
        blocks, changes = [], []
        for index, table in enumerate(self._tables):
            slot_mapping, places, first_keys, new = parts[index * _PARTS_PER_GROUP :][:_PARTS_PER_GROUP]
            whole = table.entries[:-1].view(-1, table.width)
            blocks.append(PagedBlocks(slot_mapping[:size], whole[:size], first_keys[:size]))
            changes.append(TableChanges(table.entries, places, new))
        step = PagedStep(
            full=blocks[0],
            sliding=blocks[1] if len(blocks) > 1 else None,
            query_starts=self._query_starts[: size + 1],
            kv_lens=kv_lens[:size],
            mutual=None,
            max_query_len=1,
            max_kv_len=self._shape.full.max_blocks * self._shape.block_size,
        )
        return DecodeInputs(token_ids[:size], positions[:, :size], step, tuple(changes))


class _Table:
    """The block table of one group, on the device and, with the same contents, on the host."""

    def __init__(self, size: int, pool: PoolShape, device: torch.device) -> None:
        self.unread_block = pool.unread_block
        self.width = pool.max_blocks
        # The entry after the table takes the changes that a step does not have.
        self.unread_place = size * pool.max_blocks
        self.entries = torch.full((self.unread_place + 1,), pool.unread_block, dtype=torch.int32, device=device)
        self._host = np.full((size, pool.max_blocks), pool.unread_block, dtype=np.int32)

    def changes(
        self, tables: tuple[npt.NDArray[np.int64], ...], size: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Returns places and blocks of the entries that differ from the last step's. Entries never read may stay."""
        width = max(map(len, tables), default=1)
        if width > self.width:
            raise ValueError(f"a sequence has {width} blocks, the tables of graphs have room for {self.width}")
        before = self._host[:size, :width].copy()
        for row, blocks in zip(self._host, tables, strict=False):
            row[: len(blocks)] = blocks
        # Padding sees one key, in the first block.
        self._host[len(tables) : size, 0] = self.unread_block
        rows, columns = np.nonzero(self._host[:size, :width] != before)
        return rows * self.width + columns, self._host[rows, columns]

    def replace(self, transfer: HostTransfer) -> None:
        """Copies the whole table to the device."""
        staged = transfer.staging(self._host.nbytes)
        staged.numpy()[:] = self._host.view(np.uint8).reshape(-1)
        transfer.copy(staged, self.entries[:-1].view(torch.uint8))


_Spec = tuple[torch.dtype, tuple[int, ...]]
# Slots, places of changes, first keys, and blocks of changes.
_PARTS_PER_GROUP = 4


def _specs(size: int, shape: StepShape) -> list[_Spec]:
    """Returns the parts of the buffer in order: ids, positions, lengths, and `_PARTS_PER_GROUP` for each group."""
    num_changes = size * _CHANGES_PER_TOKEN
    group: list[_Spec] = [
        (torch.int64, (size,)),
        (torch.int64, (num_changes,)),
        (torch.int32, (size,)),
        (torch.int32, (num_changes,)),
    ]
    step: list[_Spec] = [
        (torch.int64, (size,)),
        (torch.int64, (shape.num_position_axes, size)),
        (torch.int32, (size,)),
    ]
    return step + group * len(shape.pools)


def _num_bytes(spec: _Spec) -> int:
    """Returns the bytes of one part, aligned."""
    dtype, shape = spec
    return -(-math.prod(shape) * int(dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT


def _carved(buffer: Tensor, specs: Sequence[_Spec]) -> Iterator[Tensor]:
    """Yields the parts of a buffer."""
    first = 0
    for spec in specs:
        dtype, shape = spec
        stop = first + math.prod(shape) * int(dtype.itemsize)
        yield buffer[first:stop].view(dtype).view(shape)
        first += _num_bytes(spec)
