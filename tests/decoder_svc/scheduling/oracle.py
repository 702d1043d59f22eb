"""Plays the runner for a scheduler under test, and refuses a step that would compute something wrong."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from decoder_svc.scheduling.kv_cache.block_pool import BlockPool
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.row_range import RowRange, RowRangeSet
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SampledToken, ScheduledChunk, SchedulerOutput
from decoder_svc.scheduling.window import Window
from lookonce.content_key import ContentKey
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.oracle_states import States
from tests.decoder_svc.scheduling.truth import truth

REJECTED = "rejected"


class Layers:
    """Keys and values of the layers that see equally far: what is in which slot, and which request has which slots."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], Hashable] = {}
        # By the index of the block in the request's table.
        self._tables: dict[RequestId, dict[int, int]] = {}
        self._hand_out = pool.allocate
        pool.allocate = self._allocate  # type: ignore[method-assign]

    def _allocate(self, num_blocks: int) -> list[int]:
        """Clears a block's content when it is allocated."""
        blocks = self._hand_out(num_blocks)
        for slot in [slot for slot in self._slots if slot[0] in blocks]:
            del self._slots[slot]
        return blocks

    def admit(self, request_id: RequestId) -> None:
        """A request has no blocks yet."""
        self._tables[request_id] = {}

    def release(self, request_id: RequestId) -> None:
        """A request has no blocks any more."""
        self._tables.pop(request_id, None)

    def set_blocks(self, request_id: RequestId, first: int, start: int, block_ids: tuple[int, ...]) -> None:
        """From index `start` on these are the request's blocks; those before `first` it has no more."""
        kept = {index: block for index, block in self._tables[request_id].items() if first <= index < start}
        assert sorted(kept) == list(range(first, start)), "the runner is not told of some blocks"
        self._tables[request_id] = kept | dict(enumerate(block_ids, start))

    def write(self, request: Request, token: int, value: Hashable) -> None:
        """A slot gets its content, once, or again after that was rejected."""
        slot = self._slot(request.request_id, token)
        assert self._slots.get(slot, REJECTED) == REJECTED, "a slot is written twice"
        self._slots[slot] = value

    def reject(self, request: Request, token: int) -> None:
        """Marks a token's slot as the result of a rejected draft."""
        self._slots[self._slot(request.request_id, token)] = REJECTED

    def spoil(self, request_id: RequestId, token: int) -> None:
        """Marks a token's slot as garbage."""
        self._slots[self._slot(request_id, token)] = "garbage"

    def read(self, request: Request, token_ids: Sequence[int], tokens: set[int]) -> None:
        """Raises AssertionError unless the slots hold what these tokens of `token_ids` depend on."""
        for token in tokens:
            held = self._slots.get(self._slot(request.request_id, token))
            assert held == truth(request, token_ids, token), f"{request} reads another context at token {token}"

    def _slot(self, request_id: RequestId, token: int) -> tuple[int, int]:
        index, offset = divmod(token, self._block_size)
        block = self._tables[request_id].get(index)
        assert block is not None, f"{request_id} has let go of token {token}"
        return block, offset


class Oracle:
    """Plays the runner: remembers what was written where, and refuses a step that would compute something wrong."""

    def __init__(self, target: Scheduler, window: Window | None = None) -> None:
        self._target = target
        self._window = window
        kv_cache = target.kv_cache
        self._full = Layers(kv_cache.pool, kv_cache.block_size)
        self._sliding: Layers | None = None
        if kv_cache.sliding_pool is not None:
            self._sliding = Layers(kv_cache.sliding_pool, kv_cache.block_size)
        self.states = States() if kv_cache.has_states else None
        self._layers = [layers for layers in (self._full, self._sliding) if layers is not None]
        self._computed: dict[RequestId, int] = {}
        # The tokens of each request that the runner has: it knows a sampled token before the scheduler does.
        self._token_ids: dict[RequestId, list[int]] = {}
        self._rows: dict[ContentKey, RowRangeSet] = {}
        # Rows that encoders have computed for all fetches that arrived.
        self.num_encoded_rows = 0

    def run(self, output: SchedulerOutput) -> list[SampledToken]:
        """Computes a step; raises AssertionError where a token would be computed from anything but its own context."""
        self._receive(output)
        self._write(output)
        self._advance_states(output)
        for chunk in output.chunks:
            self._read(chunk)
        return [token for chunk in output.chunks for token in self._sample(chunk)]

    def take_back(self, chunk: ScheduledChunk) -> None:
        """Makes a chunk of one token void: that token turned out to be another one than the chunk was computed from."""
        request = self._target.request(chunk.request_id)
        self._computed[chunk.request_id] = chunk.start
        self._token_ids[chunk.request_id].pop()
        for layers in self._layers:
            layers.reject(request, chunk.start)

    def run_in_vain(self, output: SchedulerOutput) -> None:
        """Computes a step whose results will be dropped: it may read anything, and leaves garbage."""
        self._receive(output)
        for chunk in output.chunks:
            self.spoil(chunk)

    def _receive(self, output: SchedulerOutput) -> None:
        for request_id in output.released:
            for layers in self._layers:
                layers.release(request_id)
        for key, rows in output.evicted_rows:
            self._rows[key].remove(rows)
        for admitted in output.admitted:
            for layers in self._layers:
                layers.admit(admitted.request_id)
            self._computed[admitted.request_id] = 0
            self._token_ids[admitted.request_id] = list(admitted.token_ids)
        assert output.num_scheduled_tokens <= self._target.limits.max_num_batched_tokens, "over the token budget"
        num_rows = sum(rows.num_rows for rows in self._rows.values())
        assert num_rows <= self._target.encoder_cache.capacity_rows, "more rows on the device than there is room for"
        for chunk in output.chunks:
            self._set_blocks(chunk)
            self._check(chunk)

    def _check(self, chunk: ScheduledChunk) -> None:
        request = self._target.request(chunk.request_id)
        assert chunk.num_tokens >= 1, "a scheduled request computes something"
        assert chunk.start >= self._computed[chunk.request_id], "tokens are computed once"
        stop = chunk.start + chunk.num_tokens
        num_known = len(self._token_ids[chunk.request_id])
        for span in request.prompt.mutual_spans:
            assert not span.offset < stop < span.stop, "tokens that see each other are computed in one chunk"
        assert chunk.samples == (stop - len(chunk.draft_ids) == num_known), "whoever has all tokens samples the next"
        assert stop < request.num_prompt_tokens + request.params.max_tokens, "a token behind the end of the answer"
        if chunk.draft_ids:
            assert chunk.start == num_known - 1

    def _sample(self, chunk: ScheduledChunk) -> list[SampledToken]:
        """The tokens that the chunk leads to; what was guessed wrongly is marked in its slots."""
        request = self._target.request(chunk.request_id)
        self._computed[chunk.request_id] = stop = chunk.start + chunk.num_tokens
        if not chunk.samples:
            return []
        token_ids = self._token_ids[chunk.request_id]
        num_known = len(token_ids)
        for draft_id in chunk.draft_ids:
            token_ids.append(next_token(token_ids))
            if token_ids[-1] != draft_id:
                break
        else:
            token_ids.append(next_token(token_ids))
        self._computed[chunk.request_id] = len(token_ids) - 1
        for token in range(len(token_ids) - 1, stop):
            for layers in self._layers:
                layers.reject(request, token)
        return [SampledToken(chunk.request_id, token_id, None) for token_id in token_ids[num_known:]]

    def spoil(self, chunk: ScheduledChunk) -> None:
        """Marks all slots that a chunk wrote as garbage."""
        for token in range(max(chunk.start, chunk.write_start), chunk.start + chunk.num_tokens):
            for layers in self._layers:
                layers.spoil(chunk.request_id, token)
        if self.states is not None:
            self.states.spoil(chunk)

    def arrive(self, key: ContentKey, rows: RowRange, num_encoded_rows: int = 0) -> None:
        """Rows are on the device; an encoder computed `num_encoded_rows` of the image for them."""
        self.num_encoded_rows += num_encoded_rows
        if self._target.rows_arrived(key, rows, num_encoded_rows):
            self._rows.setdefault(key, RowRangeSet()).add(rows)

    def _set_blocks(self, chunk: ScheduledChunk) -> None:
        self._full.set_blocks(chunk.request_id, 0, chunk.block_start, chunk.block_ids)
        assert (chunk.sliding is None) == (self._sliding is None)
        if self._sliding is not None and chunk.sliding is not None:
            sliding = chunk.sliding
            self._sliding.set_blocks(chunk.request_id, sliding.first, sliding.start, sliding.block_ids)

    def _write(self, output: SchedulerOutput) -> None:
        for chunk in output.chunks:
            request = self._target.request(chunk.request_id)
            token_ids = [*self._token_ids[chunk.request_id], *chunk.draft_ids]
            for token in range(max(chunk.start, chunk.write_start), chunk.start + chunk.num_tokens):
                for layers in self._layers:
                    layers.write(request, token, truth(request, token_ids, token))

    def _advance_states(self, output: SchedulerOutput) -> None:
        assert all((chunk.states is None) == (self.states is None) for chunk in output.chunks)
        if self.states is not None:
            self.states.check(output)
            for chunk in output.chunks:
                self.states.compute(self._target.request(chunk.request_id), chunk, self._token_ids[chunk.request_id])

    def _read(self, chunk: ScheduledChunk) -> None:
        request = self._target.request(chunk.request_id)
        token_ids = [*self._token_ids[chunk.request_id], *chunk.draft_ids]
        start, stop = chunk.start, chunk.start + chunk.num_tokens
        self._full.read(request, token_ids, set(range(stop)))
        if self._sliding is not None and self._window is not None:
            self._sliding.read(request, token_ids, seen_in_window(request, start, stop, self._window))
        for item in request.prompt.images:
            first, last = item.rows_between(start, stop)
            if first < last:
                here = self._rows.get(item.key, RowRangeSet())
                assert not here.missing(RowRange(first, last)), "a chunk crosses a row that is not there"


def next_token(token_ids: Sequence[int]) -> int:
    """Returns the next token of the oracle's model, which generates short loops.

    A function of what was read, so that equal contexts go on alike.
    """
    return 7 + (token_ids[-1] + len(token_ids) // 5) % 3


def first_near(token: int, window: Window) -> int:
    """The first token that is in the window of `token`, told from the window's definition."""
    is_near = (
        token // window.size == other // window.size if window.is_chunked else token - other < window.size
        for other in range(token + 1)
    )
    return list(is_near).index(True)


def seen_in_window(request: Request, start: int, stop: int, window: Window) -> set[int]:
    """Tokens that layers with a window look at while they compute [start, stop), told from the mask's definition."""
    seen = {other for token in range(start, stop) for other in range(first_near(token, window), token + 1)}
    if request.prompt.mask is Mask.PROMPT and start < request.num_prompt_tokens:
        seen |= set(range(request.num_prompt_tokens))
    if request.prompt.mask is Mask.IMAGE:
        spans = [item.span for item in request.prompt.images if start < item.span.stop and item.span.offset < stop]
        seen |= {
            other
            for span in spans
            for token in range(max(start, span.offset), min(stop, span.stop))
            for other in range(max(span.offset, first_near(token, window)), span.stop)
        }
    return seen
