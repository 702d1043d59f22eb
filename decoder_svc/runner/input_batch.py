"""What the runner remembers of each request between steps, and how a step's chunks become flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoder_svc.scheduling.prompt import ImageItem, Span
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk

IntArray = npt.NDArray[np.int64]


class BlockTable:
    """A request's blocks of one group, on the host."""

    def __init__(self, num_tokens: int, block_size: int) -> None:
        """`num_tokens` is the longest that the request can become."""
        # Blocks before this index are let go; what stands there is never read.
        self.first = 0
        self._block_ids: IntArray = np.zeros(-(-num_tokens // block_size), dtype=np.int64)
        self._block_size = block_size

    @property
    def first_token(self) -> int:
        """The token in the first slot of the first block."""
        return self.first * self._block_size

    def set(self, start: int, block_ids: Sequence[int]) -> None:
        """Writes blocks from index `start` on."""
        self._block_ids[start : start + len(block_ids)] = block_ids

    def blocks(self, num_tokens: int) -> IntArray:
        """Of the first `num_tokens` tokens, those from `first` on."""
        return self._block_ids[self.first : -(-num_tokens // self._block_size)]

    def slots(self, start: int, stop: int, write_start: int, unread_slot: int) -> IntArray:
        """Slots of tokens [start, stop); those before `write_start` are written where nobody reads."""
        tokens = np.arange(start, stop)
        slots: IntArray = self._block_ids[tokens // self._block_size] * self._block_size + tokens % self._block_size
        slots[: max(0, write_start - start)] = unread_slot
        return slots


class RequestRow:
    """One request in the runner."""

    def __init__(self, admitted: AdmittedRequest, block_size: int, *, has_sliding_group: bool) -> None:
        num_tokens = len(admitted.token_ids)
        capacity = admitted.num_prompt_tokens + admitted.params.max_tokens
        self.params: SamplingParams = admitted.params
        self.images: tuple[ImageItem, ...] = admitted.images
        self.mutual_spans: tuple[Span, ...] = admitted.mutual_spans
        self.num_prompt_tokens = admitted.num_prompt_tokens
        self.num_tokens = num_tokens
        # What is guessed to follow, in the step in hand.
        self.draft_ids: tuple[int, ...] = ()
        self._token_ids: IntArray = np.zeros(capacity, dtype=np.int64)
        self._token_ids[:num_tokens] = admitted.token_ids
        self.full = BlockTable(capacity, block_size)
        # Where the model has layers of the sliding group.
        self.sliding = BlockTable(capacity, block_size) if has_sliding_group else None
        positions = admitted.positions
        self._prompt_positions = None if positions is None else np.asarray(positions.axes, dtype=np.int64)
        self._position_delta = 0 if positions is None else positions.delta

    @property
    def token_ids(self) -> IntArray:
        """Prompt and generated ids, `[num_tokens]`."""
        return self._token_ids[: self.num_tokens]

    def set_drafts(self, draft_ids: tuple[int, ...]) -> None:
        """Puts guesses behind the known tokens, in the place of earlier ones."""
        self.draft_ids = draft_ids
        self._token_ids[self.num_tokens : self.num_tokens + len(draft_ids)] = draft_ids

    def ids_between(self, start: int, stop: int) -> IntArray:
        """Ids of tokens [start, stop), guesses included."""
        return self._token_ids[start:stop]

    def contexts(self) -> list[IntArray]:
        """What comes before each token to be sampled: the known tokens, then each time a guess more."""
        return [self._token_ids[: self.num_tokens + index] for index in range(len(self.draft_ids) + 1)]

    def accept(self, sampled: Sequence[int]) -> int:
        """Takes over one sampled token per context, up to and with the first that is not what was guessed.

        What follows that one was sampled behind a wrong token. Returns how many are taken, at least one.
        """
        wrong = (
            index
            for index, (token_id, guess) in enumerate(zip(sampled, self.draft_ids, strict=False))
            if token_id != guess
        )
        num_taken = next(wrong, len(self.draft_ids)) + 1
        self._token_ids[self.num_tokens : self.num_tokens + num_taken] = sampled[:num_taken]
        self.num_tokens += num_taken
        self.draft_ids = ()
        return num_taken

    def set_blocks(self, chunk: ScheduledChunk) -> None:
        """Brings the block tables up to date with a chunk of this request."""
        self.full.set(chunk.block_start, chunk.block_ids)
        if self.sliding is not None:
            assert chunk.sliding is not None, "the scheduler does not know that the model has layers with a window"
            self.sliding.first = chunk.sliding.first
            self.sliding.set(chunk.sliding.start, chunk.sliding.block_ids)

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
class BlockInputs:
    """Where a step's tokens lie in the pools of one group."""

    # [num_tokens]
    slot_mapping: IntArray
    # Per request: blocks in token order, and the token in the first slot of the first of them.
    block_tables: tuple[IntArray, ...]
    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """A step's tokens, request after request."""

    # [num_tokens]
    token_ids: IntArray
    # [num_axes, num_tokens]
    positions: IntArray
    full: BlockInputs
    # Where the model has layers of the sliding group.
    sliding: BlockInputs | None
    # Per request: new tokens, and tokens including them.
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    # Per request: the stretches of its tokens that see each other and reach into the new ones.
    mutual_spans: tuple[tuple[Span, ...], ...]
    # Requests whose next token is sampled, and the flat index of the token that predicts it; where tokens are guessed,
    # of the last known one and of each guess.
    sampled_ids: tuple[RequestId, ...]
    sampled_indexes: IntArray


class InputBatch:
    """The requests that the runner knows."""

    def __init__(self, block_size: int, num_position_axes: int, *, has_sliding_group: bool) -> None:
        # Blocks that requests may have of each group, and slots of the block after each pool's last; set when the
        # pools' sizes are known.
        self.num_blocks = self.num_sliding_blocks = 0
        self._unread_slot = 0
        self._sliding_unread_slot = 0
        self._has_sliding_group = has_sliding_group
        self._block_size = block_size
        self._num_position_axes = num_position_axes
        self._rows: dict[RequestId, RequestRow] = {}

    def __getitem__(self, request_id: RequestId) -> RequestRow:
        return self._rows[request_id]

    def __len__(self) -> int:
        return len(self._rows)

    def set_num_blocks(self, num_blocks: int, num_sliding_blocks: int) -> None:
        """How many blocks requests may have of each group; each pool has one more, which nobody reads."""
        self.num_blocks, self.num_sliding_blocks = num_blocks, num_sliding_blocks
        self._unread_slot = num_blocks * self._block_size
        self._sliding_unread_slot = num_sliding_blocks * self._block_size

    def remove(self, request_id: RequestId) -> None:
        """Forgets a request; unknown ones are fine."""
        self._rows.pop(request_id, None)

    def add(self, admitted: AdmittedRequest) -> None:
        """Learns about a request."""
        row = RequestRow(admitted, self._block_size, has_sliding_group=self._has_sliding_group)
        self._rows[admitted.request_id] = row

    def flatten(self, chunks: Iterable[ScheduledChunk]) -> FlatInputs:
        """Arrays of one step; block tables must have been extended before."""
        parts = [(chunk, self._rows[chunk.request_id], chunk.start + chunk.num_tokens) for chunk in chunks]
        ends = np.cumsum([chunk.num_tokens for chunk, _, _ in parts])
        sampled = [(chunk, int(end)) for (chunk, _, _), end in zip(parts, ends, strict=True) if chunk.samples]
        sampled_indexes = [index for chunk, end in sampled for index in range(end - 1 - len(chunk.draft_ids), end)]
        axes = self._num_position_axes
        return FlatInputs(
            token_ids=np.concatenate([row.ids_between(chunk.start, stop) for chunk, row, stop in parts]),
            positions=np.concatenate([row.positions(chunk.start, stop, axes) for chunk, row, stop in parts], axis=1),
            full=_block_inputs([(chunk, row.full) for chunk, row, _ in parts], self._unread_slot),
            sliding=_block_inputs(
                [(chunk, row.sliding) for chunk, row, _ in parts if row.sliding is not None], self._sliding_unread_slot
            )
            if self._has_sliding_group
            else None,
            query_lens=tuple(chunk.num_tokens for chunk, _, _ in parts),
            kv_lens=tuple(stop for _, _, stop in parts),
            mutual_spans=tuple(row.mutual_spans_between(chunk.start, stop) for chunk, row, stop in parts),
            sampled_ids=tuple(chunk.request_id for chunk, _ in sampled),
            sampled_indexes=np.array(sampled_indexes, dtype=np.int64),
        )


def _block_inputs(parts: Sequence[tuple[ScheduledChunk, BlockTable]], unread_slot: int) -> BlockInputs:
    stops = [chunk.start + chunk.num_tokens for chunk, _ in parts]
    slots = [
        table.slots(chunk.start, stop, chunk.write_start, unread_slot)
        for (chunk, table), stop in zip(parts, stops, strict=True)
    ]
    return BlockInputs(
        slot_mapping=np.concatenate(slots),
        block_tables=tuple(table.blocks(stop) for (_, table), stop in zip(parts, stops, strict=True)),
        first_tokens=tuple(table.first_token for _, table in parts),
    )
