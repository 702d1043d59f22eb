"""The runner's state of each request between steps, and the flattening of a step's chunks into arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch import Tensor

from decoder_svc.runner.sampling.sampling_state import SamplingState
from decoder_svc.scheduling.prompt import ImageItem, Span
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams, TokenConstraint
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, StateUse

IntArray = npt.NDArray[np.int64]


class RequestBlocks:
    """The block ids of one request in one group, on the host."""

    def __init__(self, num_tokens: int, block_size: int) -> None:
        """`num_tokens` is the largest length that the request can reach."""
        # Blocks before this index have been released; their entries are never read.
        self.first = 0
        self._block_ids: IntArray = np.zeros(-(-num_tokens // block_size), dtype=np.int64)
        self._block_size = block_size

    @property
    def first_token(self) -> int:
        """Index of the token in the first slot of the first block that is kept."""
        return self.first * self._block_size

    def set(self, start: int, block_ids: Sequence[int]) -> None:
        """Stores block ids from index `start` on."""
        self._block_ids[start : start + len(block_ids)] = block_ids

    def blocks(self, num_tokens: int) -> IntArray:
        """Returns the blocks of the first `num_tokens` tokens, without the released ones."""
        return self._block_ids[self.first : -(-num_tokens // self._block_size)]

    def slot(self, token: int) -> int:
        """Returns the slot of one token."""
        return int(self._block_ids.item(token // self._block_size)) * self._block_size + token % self._block_size

    def slots(self, start: int, stop: int, write_start: int, unread_slot: int) -> IntArray:
        """Returns the slots of tokens [start, stop); tokens before `write_start` get `unread_slot`."""
        tokens = np.arange(start, stop)
        slots: IntArray = self._block_ids[tokens // self._block_size] * self._block_size + tokens % self._block_size
        slots[: max(0, write_start - start)] = unread_slot
        return slots


class RequestRow:
    """One request in the batch: its tokens, blocks, positions and sampling parameters."""

    def __init__(self, admitted: AdmittedRequest, block_size: int, *, has_sliding_group: bool) -> None:
        num_tokens = len(admitted.token_ids)
        capacity = admitted.num_prompt_tokens + admitted.params.max_tokens
        self.params: SamplingParams = admitted.params
        self.constraint: TokenConstraint | None = admitted.constraint
        # Fingerprint of the LoRA adapter; None: the base model.
        self.adapter: str | None = admitted.adapter
        self.sampling = SamplingState(admitted.params.seed, admitted.num_prompt_tokens)
        self.images: tuple[ImageItem, ...] = admitted.images
        self.mutual_spans: tuple[Span, ...] = admitted.mutual_spans
        self.num_prompt_tokens = admitted.num_prompt_tokens
        self.num_tokens = num_tokens
        # Draft tokens of the current step, after the known tokens.
        self.draft_ids: tuple[int, ...] = ()
        # The last token's place among the sampled ids of the latest step; None if the host knows the token's id.
        self.unknown_place: int | None = None
        # Sum of the hidden states of the prompt so far, float64; None: nothing is summed up.
        self.hidden_sum: Tensor | None = None
        # Log probabilities of the prompt's tokens so far, by their places.
        self.prompt_logprobs: dict[int, tuple[tuple[int, float], ...]] = {}
        # Number of tokens that turned out to be other ones than the step behind them had read.
        self.num_corrections = 0
        self._token_ids: IntArray = np.zeros(capacity, dtype=np.int64)
        self._token_ids[:num_tokens] = admitted.token_ids
        self.full = RequestBlocks(capacity, block_size)
        # None for a model without a sliding group.
        self.sliding = RequestBlocks(capacity, block_size) if has_sliding_group else None
        positions = admitted.positions
        self._prompt_positions = None if positions is None else np.asarray(positions.axes, dtype=np.int64)
        self._position_delta = 0 if positions is None else positions.delta

    @property
    def has_answer(self) -> bool:
        """Whether there are generated tokens."""
        return self.num_tokens > self.num_prompt_tokens

    def take_prompt_logprobs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Returns the log probabilities of all tokens of the prompt but the first, and forgets them.

        Later tokens of an answer come without them, and those of requests that did not ask.
        """
        if self.params.prompt_logprobs is None or self.has_answer:
            return ()
        found, self.prompt_logprobs = self.prompt_logprobs, {}
        return tuple(found.get(place, ()) for place in range(1, self.num_prompt_tokens))

    @property
    def token_ids(self) -> IntArray:
        """Ids of the prompt and of the generated tokens, `[num_tokens]`; 0 for one that is not known yet."""
        return self._token_ids[: self.num_tokens]

    def set_drafts(self, draft_ids: tuple[int, ...]) -> None:
        """Appends draft tokens to the known tokens; replaces earlier drafts."""
        self.draft_ids = draft_ids
        if draft_ids:
            self._token_ids[self.num_tokens : self.num_tokens + len(draft_ids)] = draft_ids

    def id_at(self, index: int) -> int:
        """Returns the id of one token; 0 if it is not known yet."""
        return int(self._token_ids.item(index))

    def ids_between(self, start: int, stop: int) -> IntArray:
        """Returns the ids of tokens [start, stop), drafts included."""
        return self._token_ids[start:stop]

    def contexts(self) -> list[IntArray]:
        """Returns the preceding tokens of each token to be sampled: the known tokens, then one draft more each time."""
        return [self._token_ids[: self.num_tokens + index] for index in range(len(self.draft_ids) + 1)]

    def expect(self, place: int) -> int:
        """Appends a token that the step samples at `place` and whose id is not known. Returns the token's index."""
        self.unknown_place = place
        self.num_tokens += 1
        return self.num_tokens - 1

    def learn(self, index: int, token_id: int) -> None:
        """Stores the id of an expected token. Another one may have been expected since."""
        self._token_ids[index] = token_id
        if index == self.num_tokens - 1:
            self.unknown_place = None

    def correct(self, index: int, token_id: int) -> bool:
        """Stores the id of an expected token for which the device has another id.

        Takes back the token that was expected since, if there is one: it was sampled behind the other id. Returns
        whether there is.
        """
        was_read = index < self.num_tokens - 1
        if was_read:
            self.num_tokens = index + 1
            self.num_corrections += 1
        self.learn(index, token_id)
        return was_read

    def accept(self, sampled: Sequence[int]) -> int:
        """Appends sampled tokens, one per context, up to and including the first that differs from its draft.

        Later ones were sampled after a wrong token and are dropped. Returns the number of tokens taken, at least one.
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
        """Updates the block tables from a chunk of this request."""
        if chunk.block_ids:
            self.full.set(chunk.block_start, chunk.block_ids)
        if self.sliding is not None:
            assert chunk.sliding is not None, "the scheduler gave no blocks of the sliding group"
            self.sliding.first = chunk.sliding.first
            self.sliding.set(chunk.sliding.start, chunk.sliding.block_ids)

    def mutual_spans_between(self, start: int, stop: int) -> tuple[Span, ...]:
        """Returns the mutual spans that overlap tokens [start, stop)."""
        if not self.mutual_spans or start >= self.num_prompt_tokens:
            return ()
        return tuple(span for span in self.mutual_spans if span.stop > start and span.offset < stop)

    def answer_position(self, index: int) -> int:
        """Returns the rotary position, on each axis, of a token behind the prompt."""
        return index + self._position_delta

    def positions(self, start: int, stop: int, num_axes: int) -> IntArray:
        """Returns the rotary positions of tokens [start, stop), `[num_axes, stop - start]`."""
        positions = np.broadcast_to(np.arange(start, stop) + self._position_delta, (num_axes, stop - start))
        if self._prompt_positions is None or start >= self.num_prompt_tokens:
            return positions
        in_prompt = self._prompt_positions[:, start : min(stop, self.num_prompt_tokens)]
        return np.concatenate([in_prompt, positions[:, in_prompt.shape[1] :]], axis=1)


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """Positions of a step's tokens in the pools of one group."""

    # [num_tokens]
    slot_mapping: IntArray
    # Per request: blocks in token order, and the index of the token in the first slot of the first block.
    block_tables: tuple[IntArray, ...]
    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """The tokens of a step, one request after the other."""

    # [num_tokens]
    token_ids: IntArray
    # [num_axes, num_tokens]
    positions: IntArray
    full: BlockInputs
    # None for a model without a sliding group.
    sliding: BlockInputs | None
    # Per request: number of new tokens, and of all tokens including them.
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    # Per request: spans of tokens that all see each other and overlap the new tokens.
    mutual_spans: tuple[tuple[Span, ...], ...]
    # Requests whose next token is sampled, and the flat indexes of the tokens that predict it: the last known token and
    # each draft.
    sampled_ids: tuple[RequestId, ...]
    sampled_indexes: IntArray
    # Flat indexes of the tokens that the latest step samples, and their places among its sampled ids. Only the device
    # has them: their `token_ids` are 0.
    unknown: tuple[tuple[int, int], ...] = ()
    # Per request: the states of recurrent layers; empty for a model without such layers.
    states: tuple[StateUse, ...] = ()


class InputBatch:
    """The admitted requests, and the flattening of their chunks into one step."""

    def __init__(self, block_size: int, num_position_axes: int, *, has_sliding_group: bool) -> None:
        # Blocks per group, and the first slot of the extra block behind them; set when the pools are allocated.
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
        """Sets the number of blocks per group. Each pool has one extra block behind them that nobody reads."""
        self.num_blocks, self.num_sliding_blocks = num_blocks, num_sliding_blocks
        self._unread_slot = num_blocks * self._block_size
        self._sliding_unread_slot = num_sliding_blocks * self._block_size

    def remove(self, request_id: RequestId) -> None:
        """Removes a request; unknown ids are ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            row.sampling.release()

    def add(self, admitted: AdmittedRequest) -> None:
        """Adds an admitted request to the batch; it replaces an earlier one with the same id."""
        self.remove(admitted.request_id)
        row = RequestRow(admitted, self._block_size, has_sliding_group=self._has_sliding_group)
        self._rows[admitted.request_id] = row

    def has_image_tokens(self, chunks: Iterable[ScheduledChunk]) -> bool:
        """Whether any token of the chunks lies inside an image."""
        return any(
            item.span.offset < chunk.start + chunk.num_tokens and item.span.stop > chunk.start
            for chunk in chunks
            for item in self._rows[chunk.request_id].images
        )

    def flatten(self, chunks: Iterable[ScheduledChunk]) -> FlatInputs:
        """Returns the arrays of one step. Block tables must be up to date."""
        parts = [(chunk, self._rows[chunk.request_id], chunk.start + chunk.num_tokens) for chunk in chunks]
        ends = list(accumulate([chunk.num_tokens for chunk, _, _ in parts]))
        sampled = [(chunk, end) for (chunk, _, _), end in zip(parts, ends, strict=True) if chunk.samples]
        sampled_indexes = [index for chunk, end in sampled for index in range(end - 1 - len(chunk.draft_ids), end)]
        unknown = [
            (end - 1, row.unknown_place)
            for (_, row, stop), end in zip(parts, ends, strict=True)
            if row.unknown_place is not None and stop == row.num_tokens
        ]
        token_ids, positions = self._tokens(parts, ends)
        return FlatInputs(
            token_ids=token_ids,
            positions=positions,
            full=_block_inputs([(chunk, row.full) for chunk, row, _ in parts], ends, self._unread_slot),
            sliding=_block_inputs(
                [(chunk, row.sliding) for chunk, row, _ in parts if row.sliding is not None],
                ends,
                self._sliding_unread_slot,
            )
            if self._has_sliding_group
            else None,
            query_lens=tuple(chunk.num_tokens for chunk, _, _ in parts),
            kv_lens=tuple(stop for _, _, stop in parts),
            mutual_spans=tuple(row.mutual_spans_between(chunk.start, stop) for chunk, row, stop in parts),
            sampled_ids=tuple(chunk.request_id for chunk, _ in sampled),
            sampled_indexes=np.array(sampled_indexes, dtype=np.int64),
            unknown=tuple(unknown),
            states=tuple(chunk.states for chunk, _, _ in parts if chunk.states is not None),
        )

    def _tokens(
        self, parts: Sequence[tuple[ScheduledChunk, RequestRow, int]], ends: Sequence[int]
    ) -> tuple[IntArray, IntArray]:
        """Returns ids, `[num_tokens]`, and positions, `[num_axes, num_tokens]`.

        Single tokens of answers, which most steps consist of, are gathered as numbers: an array for each would take
        several times as long.
        """
        token_ids = np.empty(ends[-1], dtype=np.int64)
        positions = np.empty((self._num_position_axes, ends[-1]), dtype=np.int64)
        places: list[int] = []
        ids: list[int] = []
        of_answers: list[int] = []
        for (chunk, row, stop), end in zip(parts, ends, strict=True):
            if chunk.num_tokens == 1 and chunk.start >= row.num_prompt_tokens:
                places.append(end - 1)
                ids.append(row.id_at(chunk.start))
                of_answers.append(row.answer_position(chunk.start))
            else:
                of_chunk = slice(end - chunk.num_tokens, end)
                token_ids[of_chunk] = row.ids_between(chunk.start, stop)
                positions[:, of_chunk] = row.positions(chunk.start, stop, self._num_position_axes)
        if len(places) == len(parts):
            axes = [of_answers] * self._num_position_axes
            return np.array(ids, dtype=np.int64), np.array(axes, dtype=np.int64)
        if places:
            token_ids[places] = ids
            positions[:, places] = of_answers
        return token_ids, positions


def _block_inputs(
    parts: Sequence[tuple[ScheduledChunk, RequestBlocks]], ends: Sequence[int], unread_slot: int
) -> BlockInputs:
    """`ends` are the flat indexes behind the chunks."""
    stops = [chunk.start + chunk.num_tokens for chunk, _ in parts]
    slot_mapping = np.empty(ends[-1], dtype=np.int64)
    places: list[int] = []
    slots: list[int] = []
    for (chunk, table), stop, end in zip(parts, stops, ends, strict=True):
        if chunk.num_tokens == 1 and chunk.write_start <= chunk.start:
            places.append(end - 1)
            slots.append(table.slot(chunk.start))
        else:
            slot_mapping[end - chunk.num_tokens : end] = table.slots(chunk.start, stop, chunk.write_start, unread_slot)
    if len(places) == len(parts):
        slot_mapping = np.array(slots, dtype=np.int64)
    elif places:
        slot_mapping[places] = slots
    return BlockInputs(
        slot_mapping=slot_mapping,
        block_tables=tuple(table.blocks(stop) for (_, table), stop in zip(parts, stops, strict=True)),
        first_tokens=tuple(table.first_token for _, table in parts),
    )
