"""Passes with prompt chunks at fixed numbers of tokens, recorded once into graphs and replayed with other numbers.

A graph has a fixed number of tokens and of sequences, and any division of the tokens among the sequences: lengths are
tensors. Left-over sequences have no tokens. Left-over tokens belong to one more sequence, the last one: it writes to
the block that nobody reads and sees only itself.

Tokens of images have rows instead of embeddings. The rows are written before a replay, and the pass takes them where
the step says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoder_svc.runner.graphs.decode_table import Decoded, Feed, Record, StepShape, group_specs
from decoder_svc.runner.graphs.inputs import BlockTable, InputBuffer, Spec, Staged, TableChanges
from decoder_svc.runner.graphs.state_inputs import StateInputs
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.input_batch import BlockInputs, FlatInputs
from decoder_svc.runner.paged_step import MutualRanges, PagedBlocks, PagedStep, mutual_bounds

# Larger steps keep the device busy for longer than their kernels take to launch. Without a graph, an H100 took 25 ms
# for 1,024 tokens of a model with 2 billion weights, whose matrix products take 3.5 ms.
_MAX_SIZE = 2048
# Distances of sizes, each up to a number of tokens.
_SMALLEST, _STEPS = 16, ((32, 256), (64, 512), (128, _MAX_SIZE))
# Entries of a block table that a step may change without copying it: a prompt of 16,384 tokens in blocks of 16.
_NUM_CHANGES = 1024


def chunk_graph_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Returns numbers of tokens, ascending up to 2,048, or up to the first that holds the largest step.

    A step is padded by less than an eighth of its tokens, or less than 32 tokens.
    """
    sizes = [_SMALLEST]
    for distance, most in _STEPS:
        sizes += range(-(-(sizes[-1] + 1) // distance) * distance, most + 1, distance)
    largest = next((size for size in sizes if size >= max_num_batched_tokens), sizes[-1])
    return tuple(size for size in sizes if size <= largest)


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Properties of the model that the inputs of chunks depend on."""

    # Elements of an image's row.
    row_elements: int
    # Element type of embeddings.
    dtype: torch.dtype
    # Whether tokens of a mutual span see each other beyond the window of a layer; None for a model without such spans.
    is_mutual_beyond_window: bool | None


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """Inputs of a pass with prompt chunks."""

    # [num_tokens].
    token_ids: Tensor
    # [num_axes, num_tokens].
    positions: Tensor
    # Rows of images, [num_tokens, row_elements], and where they replace embeddings, bool [num_tokens].
    rows: Tensor
    has_row: Tensor
    # Indexes of the tokens whose logits are computed; places after the step's own ones repeat the first token.
    sampled_indexes: Tensor
    step: PagedStep
    # To be applied before the pass.
    changes: tuple[TableChanges, ...]


class ChunkGraphTable:
    """Recorded passes by number of tokens, and the input tensors that they share."""

    def __init__(
        self,
        sizes: Iterable[int],
        shape: StepShape,
        chunk_shape: ChunkShape,
        tables: Sequence[BlockTable],
        transfer: HostTransfer,
    ) -> None:
        """`tables` are those of decode passes; the last row of each belongs to padding.

        Raises ValueError if a row is too short for the largest size, which consists of padding when it is recorded.
        """
        self.sizes = tuple(sorted(sizes))
        if any(table.width * shape.block_size < self.sizes[-1] for table in tables):
            raise ValueError(f"a row of a block table does not hold {self.sizes[-1]} tokens of padding")
        self._shape = shape
        self._chunk_shape = chunk_shape
        self._tables = tables
        self._num_sequences = len(tables[0].entries) - 1
        size = self.sizes[-1]
        self._states = None if shape.states is None else StateInputs(shape.states, size, self._num_sequences + 1)
        self._buffer = InputBuffer(self._specs(size), transfer)
        self._rows = torch.zeros(size, chunk_shape.row_elements, dtype=chunk_shape.dtype, device=transfer.device)
        self._replays: dict[int, Callable[[], Decoded]] = {}
        # The input tensors of each size.
        self._inputs: dict[int, ChunkInputs] = {}

    def capture(self, forward: Callable[[ChunkInputs], Decoded], record: Record) -> None:
        """Records `forward` at every size, largest first, so that smaller graphs reuse the largest one's memory."""
        for size in reversed(self.sizes):
            self._replays[size] = record(functools.partial(forward, self.fill(None, size)))

    def size_for(self, flat: FlatInputs) -> int | None:
        """Returns the smallest recorded size that holds a step; None if there is none."""
        num_tokens = len(flat.token_ids)
        size = next((size for size in self.sizes if size >= num_tokens), None)
        if size is None or len(flat.query_lens) > self._num_sequences:
            return None
        return size if len(flat.sampled_indexes) <= self._num_sampled(size) else None

    def rows_of(self, num_tokens: int) -> Tensor:
        """Returns the memory for rows of a step's images, `[num_tokens, row_elements]`."""
        return self._rows[:num_tokens]

    def fill(self, flat: FlatInputs | None, size: int, row_indexes: Sequence[int] = ()) -> ChunkInputs:
        """Copies a step's numbers into the input tensors of the graph of this size; returns those tensors.

        `row_indexes` are the tokens whose rows have been written to `rows_of`. None stands for padding alone. Raises
        ValueError if a block table is wider than the tables of graphs.
        """
        num_tokens, num_sequences = (0, 0) if flat is None else (len(flat.token_ids), len(flat.query_lens))
        last = self._num_sequences
        with self._buffer.staged() as staged:
            for name in ("token_ids", "has_row", "sampled_indexes"):
                staged[name][:] = 0
            staged["positions"][:, num_tokens:] = 0
            query_starts, kv_lens = staged["query_starts"], staged["kv_lens"]
            query_starts[0], query_starts[num_sequences + 1 : last + 1], query_starts[last + 1] = 0, num_tokens, size
            kv_lens[num_sequences:last], kv_lens[last] = 0, size - num_tokens
            if flat is not None:
                staged["token_ids"][:num_tokens] = flat.token_ids
                staged["has_row"][list(row_indexes)] = True
                staged["sampled_indexes"][: len(flat.sampled_indexes)] = flat.sampled_indexes
                staged["positions"][:, :num_tokens] = flat.positions
                query_starts[1 : num_sequences + 1] = np.cumsum(flat.query_lens)
                kv_lens[:num_sequences] = flat.kv_lens
            if self._has_mutual:
                self._fill_mutual(flat, size, staged)
            if self._states is not None:
                self._states.fill(flat, staged, query_starts)
            for index, table in enumerate(self._tables):
                group = None if flat is None else (flat.full, flat.sliding)[index]
                self._fill_group(group, size, index, table, staged)
        if size not in self._inputs:
            self._inputs[size] = self._first_inputs(size)
        return self._inputs[size]

    def replay(self, flat: FlatInputs, size: int, feed: Feed, row_indexes: Sequence[int] = ()) -> Decoded:
        """Returns the results of a step's sampled tokens. The next replay overwrites them."""
        feed(self.fill(flat, size, row_indexes).token_ids)
        decoded = self._replays[size]()
        num_sampled = len(flat.sampled_indexes)
        return Decoded(decoded.logits[:num_sampled], decoded.likeliest[:num_sampled])

    def _fill_mutual(self, flat: FlatInputs | None, size: int, staged: Staged) -> None:
        num_tokens = 0
        if flat is not None:
            num_tokens = len(flat.token_ids)
            staged["starts"][:num_tokens], staged["stops"][:num_tokens] = mutual_bounds(flat)
        places = np.arange(size - num_tokens)
        staged["starts"][num_tokens:size], staged["stops"][num_tokens:size] = places, places + 1

    def _fill_group(self, inputs: BlockInputs | None, size: int, index: int, table: BlockTable, staged: Staged) -> None:
        slots, first_keys = staged[f"slot_mapping_{index}"], staged[f"first_keys_{index}"]
        block_tables = () if inputs is None else inputs.block_tables
        num_tokens = 0
        if inputs is not None:
            num_tokens = len(inputs.slot_mapping)
            slots[:num_tokens], first_keys[: len(block_tables)] = inputs.slot_mapping, inputs.first_tokens
        block_size = self._shape.block_size
        slots[num_tokens:size] = table.unread_block * block_size + np.arange(size - num_tokens) % block_size
        first_keys[len(block_tables) :] = 0
        table.stage(block_tables, len(block_tables), staged[f"places_{index}"], staged[f"blocks_{index}"])

    @property
    def _has_mutual(self) -> bool:
        return self._chunk_shape.is_mutual_beyond_window is not None

    def _num_sampled(self, size: int) -> int:
        """Returns the number of tokens whose logits a pass computes."""
        return min(size, self._num_sequences)

    def _first_inputs(self, size: int) -> ChunkInputs:
        """Returns the first `size` tokens of the input tensors."""
        parts = self._buffer.parts
        blocks = [
            PagedBlocks(parts[f"slot_mapping_{index}"][:size], table.entries, parts[f"first_keys_{index}"])
            for index, table in enumerate(self._tables)
        ]
        mutual = None
        if self._chunk_shape.is_mutual_beyond_window is not None:
            bounds = parts["starts"][:size], parts["stops"][:size]
            mutual = MutualRanges(*bounds, self._chunk_shape.is_mutual_beyond_window)
        step = PagedStep(
            full=blocks[0],
            sliding=blocks[1] if len(blocks) > 1 else None,
            query_starts=parts["query_starts"],
            kv_lens=parts["kv_lens"],
            mutual=mutual,
            max_query_len=size,
            max_kv_len=self._shape.max_kv_len,
            states=None if self._states is None else self._states.step(self._buffer, size, self._num_sequences + 1),
        )
        changes = tuple(
            table.recorded_changes(parts[f"places_{index}"], parts[f"blocks_{index}"])
            for index, table in enumerate(self._tables)
        )
        return ChunkInputs(
            parts["token_ids"][:size],
            parts["positions"][:, :size],
            self._rows[:size],
            parts["has_row"][:size],
            parts["sampled_indexes"][: self._num_sampled(size)],
            step,
            changes,
        )

    def _specs(self, size: int) -> dict[str, Spec]:
        num_sequences = self._num_sequences + 1
        specs: dict[str, Spec] = {
            "token_ids": (torch.int64, (size,)),
            "positions": (torch.int64, (self._shape.num_position_axes, size)),
            "sampled_indexes": (torch.int64, (self._num_sampled(size),)),
            "query_starts": (torch.int32, (num_sequences + 1,)),
            "kv_lens": (torch.int32, (num_sequences,)),
            "has_row": (torch.bool, (size,)),
        }
        if self._has_mutual:
            specs |= {"starts": (torch.int32, (size,)), "stops": (torch.int32, (size,))}
        for index in range(len(self._tables)):
            specs |= group_specs(index, size, num_sequences, _NUM_CHANGES)
        if self._states is not None:
            specs |= self._states.specs
        return specs
