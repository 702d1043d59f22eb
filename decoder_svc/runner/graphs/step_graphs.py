"""Chooses the recorded graph of a step: one of single tokens, one with prompt chunks, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decoder_svc.runner.graphs.chunk_table import ChunkGraphTable, ChunkInputs, ChunkShape
from decoder_svc.runner.graphs.decode_table import (
    Decoded,
    DecodeInputs,
    Feed,
    GraphTable,
    Record,
    SharedOutput,
    StepShape,
)
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.input_batch import FlatInputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Numbers of tokens that are recorded."""

    # Steps of single tokens; not empty.
    decodes: tuple[int, ...]
    # Steps with prompt chunks.
    chunks: tuple[int, ...]


class Passes(Protocol):
    """The passes that are recorded. Both return logits, `[num_rows, vocab]`."""

    def decode(self, inputs: DecodeInputs) -> Tensor:
        """Computes one new token per request."""
        ...

    def compute_chunks(self, inputs: ChunkInputs) -> Tensor:
        """Computes any division of tokens among requests."""
        ...

    @property
    def records_rows(self) -> bool:
        """Whether `compute_chunks` takes rows of images."""
        ...


class StepGraphs:
    """The graphs of one runner over one KV cache. They share input tensors, block tables and results."""

    def __init__(self, sizes: GraphSizes, shape: StepShape, chunk_shape: ChunkShape, transfer: HostTransfer) -> None:
        self._decodes = GraphTable(sizes.decodes, shape, transfer)
        self._transfer = transfer
        # None if there are no such graphs.
        self._chunks: ChunkGraphTable | None = None
        if sizes.chunks:
            self._chunks = ChunkGraphTable(sizes.chunks, shape, chunk_shape, self._decodes.tables, transfer)
        self._records_rows = False

    @property
    def sizes(self) -> GraphSizes:
        """Numbers of tokens of the graphs that exist."""
        return GraphSizes(self._decodes.sizes, () if self._chunks is None else self._chunks.sizes)

    def capture(self, passes: Passes, record: Record) -> None:
        """Records all graphs, the largest first: steps with prompt chunks, then steps of single tokens.

        Raises RuntimeError if steps of single tokens cannot be recorded.
        """
        output = SharedOutput(self._decodes.sizes[-1])
        self._records_rows = passes.records_rows
        if self._chunks is not None:
            try:
                self._chunks.capture(lambda inputs: output.held(passes.compute_chunks(inputs)), record)
            except RuntimeError as error:
                logger.warning("no graphs of steps with prompt chunks: %s", error)
                self._chunks = None
        self._decodes.capture(lambda inputs: output.held(passes.decode(inputs)), record)

    def replay(
        self, flat: FlatInputs, feed: Feed, place_rows: Callable[[Tensor], list[int]] | None = None
    ) -> Decoded | None:
        """Returns the results of the sampled tokens if a graph computes this step, otherwise None.

        `feed` writes ids that only the device has into the step's token ids. `place_rows` is None for a step without
        tokens of images. It writes rows to `[num_tokens, row_elements]` and returns the indexes of their tokens.
        """
        try:
            return self._replayed(flat, feed, place_rows)
        except Exception:
            for table in self._decodes.tables:
                table.is_behind = True
            raise

    def _replayed(
        self, flat: FlatInputs, feed: Feed, place_rows: Callable[[Tensor], list[int]] | None
    ) -> Decoded | None:
        if max(flat.query_lens) == 1 and not any(flat.mutual_spans) and place_rows is None:
            return self._replayed_decode(flat, feed)
        if self._chunks is None or (size := self._chunks.size_for(flat)) is None:
            return None
        if place_rows is None:
            return self._chunks.replay(flat, size, feed)
        if not self._records_rows:
            return None
        return self._chunks.replay(flat, size, feed, place_rows(self._chunks.rows_of(len(flat.token_ids))))

    def _replayed_decode(self, flat: FlatInputs, feed: Feed) -> Decoded | None:
        size = self._decodes.size_for(len(flat.token_ids))
        if size is None:
            return None
        decoded = self._decodes.replay(flat, size, feed)
        if len(flat.sampled_indexes) == len(flat.token_ids):
            return decoded
        sampled = self._transfer.move(torch.from_numpy(flat.sampled_indexes))
        return Decoded(decoded.logits.index_select(0, sampled), decoded.likeliest.index_select(0, sampled))
