"""What the runner remembers of each request between steps, and how a step's chunks become flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoder_svc.request import ImageItem, RequestId, SamplingParams, Span
from decoder_svc.scheduler_output import AdmittedRequest, ScheduledChunk

IntArray = npt.NDArray[np.int64]


class RequestRow:
    """One request in the runner."""

    def __init__(self, admitted: AdmittedRequest, block_size: int) -> None:
        num_tokens = len(admitted.token_ids)
        capacity = admitted.num_prompt_tokens + admitted.params.max_tokens
        self.params: SamplingParams = admitted.params
        self.images: tuple[ImageItem, ...] = admitted.images
        self.mutual_spans: tuple[Span, ...] = admitted.mutual_spans
        self.num_prompt_tokens = admitted.num_prompt_tokens
        self.num_tokens = num_tokens
        self._token_ids: IntArray = np.zeros(capacity, dtype=np.int64)
        self._token_ids[:num_tokens] = admitted.token_ids
        self._block_ids: IntArray = np.zeros(-(-capacity // block_size), dtype=np.int64)
        self._block_size = block_size
        positions = admitted.positions
        self._prompt_positions = None if positions is None else np.asarray(positions.axes, dtype=np.int64)
        self._position_delta = 0 if positions is None else positions.delta

    @property
    def token_ids(self) -> IntArray:
        """Prompt and generated ids, `[num_tokens]`."""
        return self._token_ids[: self.num_tokens]

    def append_token(self, token_id: int) -> None:
        """Notes a sampled token."""
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def set_blocks(self, start: int, block_ids: Sequence[int]) -> None:
        """Writes blocks into the block table from index `start` on."""
        self._block_ids[start : start + len(block_ids)] = block_ids

    def blocks(self, num_tokens: int) -> IntArray:
        """The blocks of the first `num_tokens` tokens."""
        return self._block_ids[: -(-num_tokens // self._block_size)]

    def slots(self, start: int, stop: int, write_start: int, unread_slot: int) -> IntArray:
        """Slots of tokens [start, stop); those before `write_start` are written where nobody reads."""
        tokens = np.arange(start, stop)
        slots: IntArray = self._block_ids[tokens // self._block_size] * self._block_size + tokens % self._block_size
        slots[: max(0, write_start - start)] = unread_slot
        return slots

    def mutual_spans_between(self, start: int, stop: int) -> tuple[Span, ...]:
        """Those that reach into tokens [start, stop)."""
        if not self.mutual_spans or start >= self.num_prompt_tokens:
            return ()
        return tuple(span for span in self.mutual_spans if span.stop > start and span.offset < stop)

    def positions(self, start: int, stop: int, num_axes: int) -> IntArray:
        """Rotary positions of tokens [start, stop), `[num_axes, stop - start]`."""
        positions = np.broadcast_to(np.arange(start, stop) + self._position_delta, (num_axes, stop - start))
        if self._prompt_positions is None or start >= self.num_prompt_tokens:
            return positions
        in_prompt = self._prompt_positions[:, start : min(stop, self.num_prompt_tokens)]
        return np.concatenate([in_prompt, positions[:, in_prompt.shape[1] :]], axis=1)


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """A step's tokens, request after request."""

    # [num_tokens]
    token_ids: IntArray
    # [num_axes, num_tokens]
    positions: IntArray
    # [num_tokens]
    slot_mapping: IntArray
    # Per request: blocks in token order.
    block_tables: tuple[IntArray, ...]
    # Per request: new tokens, and tokens including them.
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    # Per request: the stretches of its tokens that see each other and reach into the new ones.
    mutual_spans: tuple[tuple[Span, ...], ...]
    # Requests whose next token is sampled, and the flat index of the token that predicts it.
    sampled_ids: tuple[RequestId, ...]
    sampled_indexes: IntArray


class InputBatch:
    """The requests that the runner knows."""

    def __init__(self, block_size: int, num_position_axes: int) -> None:
        # Slot of the block after the pool's last; set when the pool's size is known.
        self.unread_slot = 0
        self._block_size = block_size
        self._num_position_axes = num_position_axes
        self._rows: dict[RequestId, RequestRow] = {}

    def __getitem__(self, request_id: RequestId) -> RequestRow:
        return self._rows[request_id]

    def __len__(self) -> int:
        return len(self._rows)

    def remove(self, request_id: RequestId) -> None:
        """Forgets a request; unknown ones are fine."""
        self._rows.pop(request_id, None)

    def add(self, admitted: AdmittedRequest) -> None:
        """Learns about a request."""
        self._rows[admitted.request_id] = RequestRow(admitted, self._block_size)

    def flatten(self, chunks: Iterable[ScheduledChunk]) -> FlatInputs:
        """Arrays of one step; block tables must have been extended before."""
        parts = [(chunk, self._rows[chunk.request_id], chunk.start + chunk.num_tokens) for chunk in chunks]
        ends = np.cumsum([chunk.num_tokens for chunk, _, _ in parts])
        sampled = [index for index, (chunk, _, _) in enumerate(parts) if chunk.samples]
        axes = self._num_position_axes
        return FlatInputs(
            token_ids=np.concatenate([row.token_ids[chunk.start : stop] for chunk, row, stop in parts]),
            positions=np.concatenate([row.positions(chunk.start, stop, axes) for chunk, row, stop in parts], axis=1),
            slot_mapping=np.concatenate(
                [row.slots(chunk.start, stop, chunk.write_start, self.unread_slot) for chunk, row, stop in parts]
            ),
            block_tables=tuple(row.blocks(stop) for _, row, stop in parts),
            query_lens=tuple(chunk.num_tokens for chunk, _, _ in parts),
            kv_lens=tuple(stop for _, _, stop in parts),
            mutual_spans=tuple(row.mutual_spans_between(chunk.start, stop) for chunk, row, stop in parts),
            sampled_ids=tuple(parts[index][0].request_id for index in sampled),
            sampled_indexes=ends[sampled] - 1 if sampled else np.zeros(0, dtype=np.int64),
        )
