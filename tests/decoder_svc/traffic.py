"""Random traffic against a scheduler, with an oracle that knows what every KV slot must hold. No model, no tensors.

With a window there are layers of two kinds, thus two slots for each token; the oracle reads what either kind reads.
"""

from __future__ import annotations

import random
from collections.abc import Hashable

from decoder_svc.block_pool import BlockPool
from decoder_svc.kv_group import SlidingGroupSize
from decoder_svc.request import CacheScope, ImageItem, Request, RequestId, RequestState, RowSource
from decoder_svc.row_range import RowRange, RowRangeSet
from decoder_svc.scheduler import Scheduler
from decoder_svc.scheduler_output import RowFetch, SampledToken, ScheduledChunk, SchedulerOutput
from lookonce.content_key import ContentKey
from lookonce.families.base import Mask
from lookonce.forgotten import EVERYTHING, Forgotten
from tests.decoder_svc.scheduling import image, request, scheduler

CACHE_ROWS = 12
NUM_BLOCKS = 10
TOKEN_BUDGET = 9
# Of four tokens: a window of six and a step of nine tokens fill five of these at most.
SLIDING_BLOCKS = 6
MAX_SLIDING_BLOCKS = 5


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
        """What was in a block is gone when it is handed out."""
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
        """A slot gets its content, once."""
        slot = self._slot(request, token)
        assert slot not in self._slots, "a slot is written twice"
        self._slots[slot] = value

    def spoil(self, request: Request, token: int) -> None:
        """What was written is garbage."""
        self._slots[self._slot(request, token)] = "garbage"

    def read(self, request: Request, tokens: set[int]) -> None:
        """Raises AssertionError unless the slots hold what these tokens depend on."""
        for token in tokens:
            held = self._slots.get(self._slot(request, token))
            assert held == truth(request, token), f"{request} reads another context at token {token}"

    def _slot(self, request: Request, token: int) -> tuple[int, int]:
        index, offset = divmod(token, self._block_size)
        block = self._tables[request.request_id].get(index)
        assert block is not None, f"{request} has let go of token {token}"
        return block, offset


class Oracle:
    """Plays the runner: remembers what was written where, and refuses a step that would compute something wrong."""

    def __init__(self, target: Scheduler, window: int | None = None) -> None:
        self._target = target
        self._window = window
        kv_cache = target.kv_cache
        self._full = Layers(kv_cache.pool, kv_cache.block_size)
        self._sliding: Layers | None = None
        if kv_cache.sliding_pool is not None:
            self._sliding = Layers(kv_cache.sliding_pool, kv_cache.block_size)
        self._layers = [layers for layers in (self._full, self._sliding) if layers is not None]
        self._computed: dict[RequestId, int] = {}
        self._rows: dict[ContentKey, RowRangeSet] = {}

    def run(self, output: SchedulerOutput) -> list[SampledToken]:
        """Computes a step; raises AssertionError where a token would be computed from anything but its own context."""
        for request_id in output.released:
            for layers in self._layers:
                layers.release(request_id)
        for key, rows in output.evicted_rows:
            self._rows[key].remove(rows)
        for admitted in output.admitted:
            for layers in self._layers:
                layers.admit(admitted.request_id)
            self._computed[admitted.request_id] = 0
        assert output.num_scheduled_tokens <= self._target.limits.max_num_batched_tokens, "over the token budget"
        num_rows = sum(rows.num_rows for rows in self._rows.values())
        assert num_rows <= self._target.encoder_cache.capacity_rows, "more rows on the device than there is room for"
        for chunk in output.chunks:
            self._set_blocks(chunk)
            assert chunk.num_tokens >= 1, "a scheduled request computes something"
            assert chunk.start >= self._computed[chunk.request_id], "tokens are computed once"
            self._computed[chunk.request_id] = chunk.start + chunk.num_tokens
        self._write(output)
        for chunk in output.chunks:
            self._read(self._target.request(chunk.request_id), chunk.start, chunk.start + chunk.num_tokens)
        # What is generated depends on what was read, so that equal contexts go on alike.
        return [
            SampledToken(chunk.request_id, 7 + self._target.request(chunk.request_id).num_tokens % 3, None)
            for chunk in output.chunks
            if chunk.samples
        ]

    def spoil(self, chunk: ScheduledChunk) -> None:
        """What a chunk wrote is garbage."""
        request = self._target.request(chunk.request_id)
        for token in range(max(chunk.start, chunk.write_start), chunk.start + chunk.num_tokens):
            for layers in self._layers:
                layers.spoil(request, token)

    def arrive(self, key: ContentKey, rows: RowRange) -> None:
        """Rows are on the device."""
        if self._target.rows_arrived(key, rows, RowSource.ENCODED):
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
            for token in range(max(chunk.start, chunk.write_start), chunk.start + chunk.num_tokens):
                for layers in self._layers:
                    layers.write(request, token, truth(request, token))

    def _read(self, request: Request, start: int, stop: int) -> None:
        self._full.read(request, set(range(stop)))
        if self._sliding is not None and self._window is not None:
            self._sliding.read(request, seen_in_window(request, start, stop, self._window))
        for item in request.prompt.images:
            first, last = item.rows_between(start, stop)
            if first < last:
                here = self._rows.get(item.key, RowRangeSet())
                assert not here.missing(RowRange(first, last)), "a chunk crosses a row that is not there"


def seen_in_window(request: Request, start: int, stop: int, window: int) -> set[int]:
    """Tokens that layers with a window look at while they compute [start, stop), told from the mask's definition."""
    seen = {other for token in range(start, stop) for other in range(max(0, token - window + 1), token + 1)}
    if request.prompt.mask is Mask.PROMPT and start < request.num_prompt_tokens:
        seen |= set(range(request.num_prompt_tokens))
    if request.prompt.mask is Mask.IMAGE:
        spans = [item.span for item in request.prompt.images if start < item.span.stop and item.span.offset < stop]
        seen |= {
            other
            for span in spans
            for token in range(max(start, span.offset), min(stop, span.stop))
            for other in range(max(span.offset, token - window + 1), span.stop)
        }
    return seen


def truth(request: Request, token: int) -> Hashable:
    """Everything that the keys and values of a token depend on."""
    if request.prompt.mask is Mask.PROMPT:
        token = max(token, request.num_prompt_tokens - 1)
    return (
        request.cache_scope.salt,
        request.cache_scope.adapter,
        tuple(request.token_ids[: token + 1]),
        tuple((item.key.value, item.span.offset) for item in request.prompt.images if item.span.offset <= token),
    )


class Traffic:
    """Requests come, mostly as earlier ones slightly changed; rows come late or never; steps run, or fail."""

    def __init__(
        self, seed: int, *, deterministic: bool = False, window: int | None = None, mask: Mask = Mask.CAUSAL
    ) -> None:
        """`window`: of the layers that have one, at most 6; None: there are none."""
        # Where every choice comes from; may be replaced between actions.
        self.rng = random.Random(seed)
        self.target = scheduler(
            token_budget=TOKEN_BUDGET,
            num_blocks=NUM_BLOCKS,
            cache_rows=CACHE_ROWS,
            max_num_seqs=4,
            rows_asked=CACHE_ROWS,
            deterministic=deterministic,
            min_tokens_before_missing_row=4 if seed % 4 == 3 else 1,
            sliding=None if window is None else SlidingGroupSize(window, SLIDING_BLOCKS, MAX_SLIDING_BLOCKS),
        )
        self._mask = mask
        self.oracle = Oracle(self.target, window)
        self.requests: list[Request] = []
        self._texts: dict[RequestId, str] = {}
        self.travelling: list[RowFetch] = []
        # Steps that left the layers with a window no free block.
        self.num_short_of_sliding_blocks = 0
        # Everything that was decided, for comparing runs.
        self.trace: list[SchedulerOutput] = []

    def run(self, num_actions: int) -> None:
        """Random actions, then nothing but steps until all is done; the invariants are checked after each."""
        actions = (
            self.submit,
            self.step,
            self.step,
            self.step,
            self.end_journey,
            self.abort,
            self.fail_step,
            self.forget,
        )
        weights = (3, 3, 3, 3, 3, 1, 1, 0.1)
        for _ in range(num_actions):
            self.rng.choices(actions, weights)[0]()
            self.target.check_integrity()
        self.drain()

    def drain(self) -> None:
        """Left alone, everything ends: no lost request, no deadlock, nothing held."""
        for _ in range(600):
            if not self.target.has_requests():
                break
            self.step()
            while self.travelling:
                fetch = self.travelling.pop(0)
                self.oracle.arrive(fetch.key, fetch.rows)
            self.target.check_integrity()
        unfinished = [one for one in self.requests if one.state is not RequestState.FINISHED]
        assert not unfinished, "requests were left alone"
        assert self.target.kv_cache.pool.num_free_blocks == NUM_BLOCKS
        sliding_pool = self.target.kv_cache.sliding_pool
        assert sliding_pool is None or sliding_pool.num_free_blocks == SLIDING_BLOCKS
        for one in self.requests:
            self._check_usage(one)

    def _check_usage(self, one: Request) -> None:
        usage = one.usage
        if one.num_output_tokens == one.params.max_tokens:
            accounted = usage.encoded_image_tokens + usage.cached_image_tokens + usage.skipped_image_tokens
            assert accounted == usage.image_tokens, f"rows of {one} were counted twice or not at all"
            assert usage.cached_prompt_tokens < usage.prompt_tokens + usage.completion_tokens

    def submit(self) -> None:
        """A request comes, mostly as an earlier one slightly changed."""
        if self.requests and self.rng.random() < 0.75:
            new = self._repeated(self.rng.choice(self.requests))
        else:
            new = self._fresh()
        longest = max((span.length for span in new.prompt.mutual_spans), default=0)
        if -(-(new.num_tokens + new.params.max_tokens) // 4) <= NUM_BLOCKS and longest <= TOKEN_BUDGET:
            self.requests.append(new)
            self.target.add(new)

    def _fresh(self) -> Request:
        images: list[ImageItem] = []
        offset = 0
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            offset += self.rng.choice((0, 0, 1, 3, 4))
            images.append(image(self.rng.choice("uvw"), offset, self.rng.choice((2, 4, 5, 8))))
            offset = images[-1].span.stop
        return self._request(offset + self.rng.randint(1, 6), tuple(images), self.rng.choice("st"), CacheScope())

    def _repeated(self, earlier: Request) -> Request:
        """An earlier request with at most one thing changed, which must be enough not to be taken for it."""
        images = earlier.prompt.images
        num_tokens = earlier.num_prompt_tokens
        text, scope = self._texts[earlier.request_id], earlier.cache_scope
        change = self.rng.randrange(8)
        if change == 0 and images:
            images = (image("z", images[0].span.offset, images[0].span.length), *images[1:])
        elif change == 1 and images and (len(images) == 1 or images[0].span.stop < images[1].span.offset):
            images = (image(self._name(images[0]), images[0].span.offset + 1, images[0].span.length), *images[1:])
            num_tokens += 1
        elif change == 2:
            scope = self.rng.choice((CacheScope(salt=b"a"), CacheScope(salt=b"b"), CacheScope(adapter="a")))
        elif change == 3:
            num_tokens += self.rng.randint(1, 4)
        elif change == 4 and images and images[0].span.length >= 4:
            # The same tokens, split into two showings of the image.
            first, half = images[0].span.offset, images[0].span.length // 2
            name = self._name(images[0])
            images = (image(name, first, half), image(name, first + half, images[0].span.length - half), *images[1:])
        elif change == 5:
            text = "u"
        return self._request(num_tokens, images, text, scope)

    def _request(self, num_tokens: int, images: tuple[ImageItem, ...], text: str, scope: CacheScope) -> Request:
        new = request(
            f"r{len(self.requests)}",
            num_tokens,
            images,
            text=text,
            max_tokens=self.rng.randint(1, 5),
            priority=self.rng.choice((0, 0, 0, 1)),
            arrival_s=len(self.requests),
            cache_scope=scope,
            mask=self._mask,
        )
        self._texts[new.request_id] = text
        return new

    @staticmethod
    def _name(item: ImageItem) -> str:
        return next(name for name in "uvwz" if image(name, 0, 1).key == item.key)

    def step(self) -> None:
        """One whole step; its fetches begin."""
        output = self.target.schedule()
        self.trace.append(output)
        pool = self.target.kv_cache.sliding_pool
        self.num_short_of_sliding_blocks += pool is not None and pool.num_free_blocks == 0
        self.target.update(output, self.oracle.run(output))
        self.travelling += output.fetches

    def fail_step(self) -> None:
        """A step whose results never come."""
        output = self.target.schedule()
        self.trace.append(output)
        # The runner took note of the step and failed in the middle: nothing can be said about what it wrote.
        self.oracle.run(output)
        for chunk in output.chunks:
            self.oracle.spoil(chunk)
        self.target.fail_step(output)
        self.travelling += output.fetches

    def end_journey(self) -> None:
        """Rows on their way arrive, or fail for good."""
        if not self.travelling:
            return
        fetch = self.travelling.pop(self.rng.randrange(len(self.travelling)))
        if self.rng.random() < 0.15:
            self.target.rows_failed(fetch.key, fetch.rows, had_data=True)
        else:
            self.oracle.arrive(fetch.key, fetch.rows)

    def forget(self) -> None:
        """An operator removes an image, or all."""
        name = self.rng.choice("uvwz*")
        forgotten = EVERYTHING if name == "*" else Forgotten.of([image(name, 0, 1).key])
        self.target.forget(forgotten)

    def abort(self) -> None:
        """A client goes away."""
        if self.requests:
            self.target.abort(self.rng.choice(self.requests).request_id)
