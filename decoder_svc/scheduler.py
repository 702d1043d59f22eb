"""Decides which tokens of which request are computed in the next step. Plain Python, one caller thread.

Each request's `num_computed_tokens` catches up with its `num_tokens`. A step gives each running, then each waiting
request the largest number of new tokens that fits the token budget, the KV pool and the embedding rows that are
present; zero is a normal answer and never blocks the requests behind. There is no prefill phase and no decode phase.

Progress: requests are served in the order (priority, arrival). The first running one always gets its blocks, because
the others are preempted for it, and its rows, because what arrived for others is kept against it no longer than the
step that uses it.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from decoder_svc.encoder_cache_manager import EncoderCacheManager
from decoder_svc.kv_cache_manager import KVCacheManager
from decoder_svc.request import FinishReason, ImageItem, Request, RequestId, RequestState, RowSource
from decoder_svc.scheduler_output import AdmittedRequest, RowFetch, SampledToken, ScheduledChunk, SchedulerOutput
from lookonce.content_key import ContentKey


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step."""

    # Tokens computed in one step.
    max_num_batched_tokens: int
    # Requests in the running batch.
    max_num_seqs: int
    # Prompt and generated tokens of one request.
    max_context_tokens: int


@dataclass(slots=True)
class _Step:
    """A step while it is put together."""

    token_budget: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[AdmittedRequest] = field(default_factory=list)
    fetches: list[RowFetch] = field(default_factory=list)
    # A running request found no room for its rows: nobody behind it may take any.
    rows_are_short: bool = False
    has_preempted: bool = False


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """One generated token, and whether the request ended with it."""

    request: Request
    token: SampledToken
    finish_reason: FinishReason | None


class Scheduler:
    """Owns all live requests, their blocks and their claims on embedding rows."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_cache: KVCacheManager,
        encoder_cache: EncoderCacheManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.encoder_cache = encoder_cache
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        # Both in serving order.
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._released: list[RequestId] = []

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet, or no more."""
        return len(self._waiting)

    @property
    def num_waiting_for_rows(self) -> int:
        """Requests whose next token needs a row that is not on the device."""
        return sum(self._runnable_stop(request) <= request.num_computed_tokens for request in self._requests.values())

    def has_requests(self) -> bool:
        """Whether anything is live, or the runner has something to forget."""
        return bool(self._requests or self._released)

    def request(self, request_id: RequestId) -> Request:
        """A live request. Raises KeyError when it is not."""
        return self._requests[request_id]

    def live_requests(self) -> list[Request]:
        """All requests that have no terminal answer yet."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Queues a request that has passed the admission checks."""
        self._requests[request.request_id] = request
        self._enqueue(self._waiting, request)

    def schedule(self) -> SchedulerOutput:
        """The next step. `update` must be told its result before the next call."""
        step = _Step(self.limits.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.has_preempted:
            self._schedule_waiting(step)
        released, self._released = tuple(self._released), []
        return SchedulerOutput(
            admitted=tuple(step.admitted),
            chunks=tuple(step.chunks),
            released=released,
            evicted_keys=self.encoder_cache.take_evicted(),
            fetches=tuple(step.fetches),
        )

    def update(self, output: SchedulerOutput, sampled: Iterable[SampledToken]) -> list[TokenUpdate]:
        """Takes a step's result: computed tokens advance, new tokens are appended, ended requests leave."""
        for chunk in output.chunks:
            request = self._requests[chunk.request_id]
            request.num_computed_tokens += chunk.num_tokens
            self._pass_images(request)
        return [self._append(token) for token in sampled]

    def abort(self, request_id: RequestId) -> Request | None:
        """Ends a request in any state and frees what it has at once; None if it is not live."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    def rows_arrived(self, key: ContentKey, source: RowSource) -> bool:
        """Rows reached the device. False when nobody has room for them any more: drop them."""
        return self.encoder_cache.arrived(key, source)

    def rows_failed(self, key: ContentKey, *, had_data: bool) -> list[Request]:
        """Rows will not come. Returns the requests that cannot go on, already removed.

        A fetch without the image's bytes fails only requests that have no bytes either; the others ask again.
        """
        self.encoder_cache.drop(key)
        failed = [
            request
            for request in self._requests.values()
            if any(item.key == key and (had_data or item.data is None) for item in self._images_ahead(request))
        ]
        for request in failed:
            self._finish(request, FinishReason.ABORT)
        return failed

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks, rows and requests disagree."""
        self.kv_cache.check_integrity()
        self.encoder_cache.check_integrity()
        assert len(self._running) + len(self._waiting) == len(self._requests), "a request is nowhere or twice"
        if not self._requests:
            assert self.kv_cache.usage == 0, "blocks without a request"
            assert self.encoder_cache.num_uses() == 0, "rows are claimed by nobody"

    # One step.

    def _schedule_running(self, step: _Step) -> None:
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            num_tokens = self._num_new_tokens(request, step)
            if num_tokens > 0 and self._make_room(request, num_tokens, step):
                self._schedule_chunk(request, num_tokens, step)

    def _schedule_waiting(self, step: _Step) -> None:
        for request in list(islice(self._waiting, self.limits.max_num_seqs)):
            num_tokens = self._num_new_tokens(request, step)
            if num_tokens == 0:
                continue
            # All known tokens must fit, not only this chunk, or admission would only feed preemption.
            remaining = request.num_tokens - request.num_computed_tokens
            if len(self._running) >= self.limits.max_num_seqs or not self.kv_cache.can_allocate(request, remaining):
                break
            self._admit(request, step)
            self._schedule_chunk(request, num_tokens, step)

    def _num_new_tokens(self, request: Request, step: _Step) -> int:
        """Tokens that the budget and the present rows allow; asks for the rows that are missing."""
        self._ask_for_rows(request, step)
        stop = min(self._runnable_stop(request), request.num_computed_tokens + step.token_budget)
        return max(0, stop - request.num_computed_tokens)

    def _ask_for_rows(self, request: Request, step: _Step) -> None:
        is_running = request.state is RequestState.RUNNING
        for item in self._images_ahead(request):
            if not self.encoder_cache.is_known(item.key):
                if step.rows_are_short or not self.encoder_cache.can_reserve(item.num_rows, for_running=is_running):
                    step.rows_are_short |= is_running
                    return
                self.encoder_cache.reserve(item.key, item.num_rows, for_running=is_running)
                step.fetches.append(RowFetch(item.key, item.num_rows, item.options, item.data))
            is_resident = self.encoder_cache.is_resident(item.key)
            request.row_sources.setdefault(item.key, RowSource.DEVICE if is_resident else None)
            self.encoder_cache.use(item.key, request.request_id, running=is_running)

    def _runnable_stop(self, request: Request) -> int:
        """One past the last token before the first row that is not on the device."""
        for item in self._images_ahead(request):
            if not self.encoder_cache.is_resident(item.key):
                return min(request.num_tokens, item.first_token_with_row(request.num_computed_tokens))
        return request.num_tokens

    def _images_ahead(self, request: Request) -> Sequence[ImageItem]:
        return request.prompt.images[request.num_images_passed :]

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Preempts from the end of the running batch until the blocks are there; False if the request itself went."""
        while not self.kv_cache.can_allocate(request, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            step.has_preempted = True
            if victim is request:
                return False
        return True

    def _schedule_chunk(self, request: Request, num_tokens: int, step: _Step) -> None:
        new_blocks = self.kv_cache.allocate(request, num_tokens)
        start = request.num_computed_tokens
        samples = start + num_tokens == request.num_tokens
        step.chunks.append(ScheduledChunk(request.request_id, start, num_tokens, tuple(new_blocks), samples))
        step.token_budget -= num_tokens

    def _admit(self, request: Request, step: _Step) -> None:
        self._waiting.remove(request)
        request.state = RequestState.RUNNING
        self._enqueue(self._running, request)
        for item in self._images_ahead(request):
            if self.encoder_cache.is_known(item.key):
                self.encoder_cache.use(item.key, request.request_id, running=True)
        if request.num_preemptions == 0:
            request.usage.queue_time_s = self._clock() - request.arrival_s
        step.admitted.append(
            AdmittedRequest(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                images=request.prompt.images,
                positions=request.prompt.positions,
                params=request.params,
            )
        )

    def _preempt(self, request: Request) -> None:
        """Back to the front of its place in the queue; everything is recomputed later."""
        self._running.remove(request)
        self._free(request)
        request.state = RequestState.WAITING
        request.num_computed_tokens = 0
        request.num_images_passed = 0
        request.num_preemptions += 1
        self._enqueue(self._waiting, request)

    # After a step.

    def _pass_images(self, request: Request) -> None:
        """Gives up the claim on every image whose tokens are all computed, and accounts for it once."""
        images = request.prompt.images
        while request.num_images_passed < len(images):
            item = images[request.num_images_passed]
            if item.span.stop > request.num_computed_tokens:
                return
            request.num_images_passed += 1
            self._account(request, item)
            if all(later.key != item.key for later in self._images_ahead(request)):
                self.encoder_cache.release(item.key, request.request_id)

    def _account(self, request: Request, item: ImageItem) -> None:
        if request.num_images_passed <= request.num_images_accounted:
            return
        request.num_images_accounted = request.num_images_passed
        source = request.row_sources.get(item.key) or self.encoder_cache.source(item.key)
        if source is RowSource.ENCODED:
            request.usage.encoded_image_tokens += item.num_rows
            # The same image again in this prompt is served by the first one's rows.
            request.row_sources[item.key] = RowSource.DEVICE
        else:
            request.usage.cached_image_tokens += item.num_rows

    def _append(self, token: SampledToken) -> TokenUpdate:
        request = self._requests[token.request_id]
        if request.num_output_tokens == 0:
            request.usage.time_to_first_token_s = self._clock() - request.arrival_s
        request.token_ids.append(token.token_id)
        request.usage.completion_tokens = request.num_output_tokens
        reason = self._finish_reason(request, token.token_id)
        if reason is not None:
            self._finish(request, reason)
        return TokenUpdate(request, token, reason)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        if token_id in request.params.stop_token_ids and request.num_output_tokens >= request.params.min_tokens:
            return FinishReason.STOP
        if request.num_output_tokens >= request.params.max_tokens:
            return FinishReason.LENGTH
        if request.num_tokens >= self.limits.max_context_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        (self._running if request.state is RequestState.RUNNING else self._waiting).remove(request)
        self._free(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]

    def _free(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self._released.append(request.request_id)
        self.kv_cache.free(request.request_id)
        for item in request.prompt.images:
            self.encoder_cache.release(item.key, request.request_id)

    @staticmethod
    def _enqueue(queue: list[Request], request: Request) -> None:
        insort(queue, request, key=lambda other: (other.priority, other.arrival_s))
