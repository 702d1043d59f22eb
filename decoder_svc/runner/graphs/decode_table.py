"""Decode passes at fixed batch sizes, recorded once into graphs and replayed with other numbers.

A graph reads and writes the memory that it was recorded with. All graphs therefore share one set of input tensors, and
each uses the first rows of it. They are parts of one buffer, so a step's numbers reach them in one copy. Left-over rows
are padding: they write to the block that nobody reads, see only themselves, and their results are dropped.

Block tables stay on the device from step to step. A step brings only the entries that changed. Graphs of steps with
prompt chunks (`chunk_table.py`) share them, and the memory of results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoder_svc.runner.graphs.inputs import BlockTable, InputBuffer, PoolShape, Spec, TableChanges
from decoder_svc.runner.graphs.state_inputs import StateInputs
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.input_batch import FlatInputs
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep
from decoder_svc.runner.sampling.sampler import likeliest_ids
from decoder_svc.runner.state_step import PoolSizes

_SMALL_SIZES = (1, 2, 4)
_STEP = 8
# Entries of a block table that a step may change without copying it: a token starts at most one block.
_CHANGES_PER_TOKEN = 2


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

    # [num_tokens].
    token_ids: Tensor
    # [num_axes, num_tokens].
    positions: Tensor
    step: PagedStep
    # To be applied before the pass.
    changes: tuple[TableChanges, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The results of a pass."""

    # [num_rows, vocab].
    logits: Tensor
    # Those of `likeliest_ids`, [num_rows].
    likeliest: Tensor


# Records a function that reads and writes tensors in place; returns a function that replays it. The next replay
# overwrites the result of the last one.
Record = Callable[[Callable[[], Decoded]], Callable[[], Decoded]]


# Writes ids that only the device has into a step's token ids.
Feed = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shapes that the tensors of every step share."""

    num_position_axes: int
    block_size: int
    full: PoolShape
    # None for a model without a sliding group.
    sliding: PoolShape | None
    # Numbers of states of recurrent layers; None for a model without such layers.
    states: PoolSizes | None = None

    @property
    def pools(self) -> tuple[PoolShape, ...]:
        """The full group's limits, and the sliding group's if there is one."""
        return (self.full,) if self.sliding is None else (self.full, self.sliding)

    @property
    def max_kv_len(self) -> int:
        """Tokens of the longest possible sequence."""
        return self.full.max_blocks * self.block_size


class SharedOutput:
    """One piece of memory for the results of all graphs. Each of them would keep logits of its own otherwise."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._decoded: Decoded | None = None

    def held(self, logits: Tensor) -> Decoded:
        """Copies logits `[num_rows, vocab]` into the shared memory. A graph does this at its end."""
        if self._decoded is None:
            shared = torch.empty(self._num_rows, logits.shape[1], dtype=logits.dtype, device=logits.device)
            self._decoded = Decoded(shared, torch.empty(self._num_rows, dtype=torch.int64, device=logits.device))
        num_rows = len(logits)
        held = Decoded(self._decoded.logits[:num_rows], self._decoded.likeliest[:num_rows])
        held.logits.copy_(logits)
        likeliest_ids(logits, out=held.likeliest)
        return held


class GraphTable:
    """Recorded decode passes by batch size, and the input tensors that they share."""

    def __init__(self, sizes: Iterable[int], shape: StepShape, transfer: HostTransfer) -> None:
        self.sizes = tuple(sorted(sizes))
        self._shape = shape
        size = self.sizes[-1]
        self._states = None if shape.states is None else StateInputs(shape.states, size, size)
        self._buffer = InputBuffer(_specs(size, shape, self._states), transfer)
        # The last row belongs to the padding of steps with prompt chunks.
        self.tables = tuple(BlockTable(size + 1, pool, transfer) for pool in shape.pools)
        self._query_starts = torch.arange(size + 1, dtype=torch.int32, device=transfer.device)
        self._replays: dict[int, Callable[[], Decoded]] = {}
        # The input tensors of each size.
        self._inputs: dict[int, DecodeInputs] = {}

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
        num_tokens = 0 if flat is None else len(flat.token_ids)
        with self._buffer.staged() as staged:
            if flat is not None:
                staged["token_ids"][:num_tokens] = flat.token_ids
                staged["positions"][:, :num_tokens] = flat.positions
                staged["kv_lens"][:num_tokens] = flat.kv_lens
            staged["token_ids"][num_tokens:], staged["positions"][:, num_tokens:] = 0, 0
            staged["kv_lens"][num_tokens:] = 1
            if self._states is not None:
                self._states.fill(flat, staged, np.arange(size + 1))
            groups = (None, None) if flat is None else (flat.full, flat.sliding)
            for index, (table, group) in enumerate(zip(self.tables, groups, strict=False)):
                slots, first_keys = staged[f"slot_mapping_{index}"], staged[f"first_keys_{index}"]
                if group is not None:
                    slots[:num_tokens], first_keys[:num_tokens] = group.slot_mapping, group.first_tokens
                slots[num_tokens:], first_keys[num_tokens:] = table.unread_block * self._shape.block_size, 0
                table.stage(
                    () if group is None else group.block_tables,
                    size,
                    staged[f"places_{index}"],
                    staged[f"blocks_{index}"],
                )
        if size not in self._inputs:
            self._inputs[size] = self._first_inputs(size)
        return self._inputs[size]

    def replay(self, flat: FlatInputs, size: int, feed: Feed) -> Decoded:
        """Returns the results for a step's tokens. The next replay overwrites them."""
        feed(self.fill(flat, size).token_ids)
        decoded = self._replays[size]()
        num_tokens = len(flat.token_ids)
        return Decoded(decoded.logits[:num_tokens], decoded.likeliest[:num_tokens])

    def _first_inputs(self, size: int) -> DecodeInputs:
        """Returns the first `size` tokens of the input tensors."""
        parts = self._buffer.parts
        blocks = [
            PagedBlocks(
                parts[f"slot_mapping_{index}"][:size], table.entries[:size], parts[f"first_keys_{index}"][:size]
            )
            for index, table in enumerate(self.tables)
        ]
        step = PagedStep(
            full=blocks[0],
            sliding=blocks[1] if len(blocks) > 1 else None,
            query_starts=self._query_starts[: size + 1],
            kv_lens=parts["kv_lens"][:size],
            mutual=None,
            max_query_len=1,
            max_kv_len=self._shape.max_kv_len,
            states=None if self._states is None else self._states.step(self._buffer, size, size),
        )
        return DecodeInputs(
            parts["token_ids"][:size],
            parts["positions"][:, :size],
            step,
            tuple(
                table.recorded_changes(parts[f"places_{index}"], parts[f"blocks_{index}"])
                for index, table in enumerate(self.tables)
            ),
        )


def _specs(size: int, shape: StepShape, states: StateInputs | None) -> dict[str, Spec]:
    specs: dict[str, Spec] = {
        "token_ids": (torch.int64, (size,)),
        "positions": (torch.int64, (shape.num_position_axes, size)),
        "kv_lens": (torch.int32, (size,)),
    }
    for index in range(len(shape.pools)):
        specs |= group_specs(index, size, size, size * _CHANGES_PER_TOKEN)
    if states is not None:
        specs |= states.specs
    return specs


def group_specs(index: int, num_tokens: int, num_sequences: int, num_changes: int) -> dict[str, Spec]:
    """Returns the parts of a buffer for one group of layers."""
    return {
        f"slot_mapping_{index}": (torch.int64, (num_tokens,)),
        f"first_keys_{index}": (torch.int32, (num_sequences,)),
        f"places_{index}": (torch.int64, (num_changes,)),
        f"blocks_{index}": (torch.int32, (num_changes,)),
    }
