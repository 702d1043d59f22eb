"""Decides which tokens of which request are computed in the next step. Plain Python, for a single thread.

Each request's `num_computed_tokens` catches up with its `num_tokens`. A step gives each running, then each waiting
request the largest number of new tokens that fits the token budget, the KV pool and the embedding rows that are
present. Zero is a normal answer and never blocks the requests behind. There is no prefill phase and no decode phase.

The next step may be scheduled while one is in flight. `advance` then counts the step in flight as computed, and the
tokens that it samples as unknown ones; `update` makes them known. The runner computes steps in the order in which they
were scheduled, so whatever a step may reuse of an earlier one (blocks, rows, room) is free by the time it is computed.

The prefix cache is asked first: cached tokens cost no budget, and their rows are neither fetched nor encoded. Of the
remaining rows only those that are not on the device are fetched, range by range.

Progress: requests are served in the order (priority, turn of the tenant, arrival). The first running request always
gets its blocks, because the others are preempted for it, and its rows, because it may evict rows that only requests
behind it need. If no request runs, the head of the queue has this right. While the head waits, a request behind it
starts only if it needs no further room for rows. A waiting request gives up its claims on rows whose tokens others have
computed meanwhile; tests/decoder_svc/scheduling/test_progress.py checks the rule. Should no request advance all the
same, the engine thread notices and restarts all (`restart_all`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager, PrefixHit
from decoder_svc.scheduling.place_sharing import PlaceSharing
from decoder_svc.scheduling.request import Request, RequestId, RequestState
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.row_demand import RowDemand
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.scheduler_limits import ChunkSize, SchedulerLimits
from decoder_svc.scheduling.scheduler_output import (
    AdmittedRequest,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
    StepInProgress,
    TokenUpdate,
    tokens_by_request,
)
from decoder_svc.scheduling.speculation import Speculation
from decoder_svc.scheduling.step_results import StepResults
from decoder_svc.scheduling.tenant_shares import TenantShares
from decoder_svc.scheduling.waiting_queue import WaitingQueue, enqueue
from lookonce.content_key import ContentKey
from lookonce.forgotten import Forgotten

# Waiting requests that cannot be admitted yet but whose rows are fetched. More would cost more than they gain.
_NUM_LOOKED_AHEAD = 4


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
        self._row_demand = RowDemand(encoder_cache, limits.max_num_rows_asked, overlap_encode=limits.overlap_encode)
        self._chunk_size = ChunkSize(limits, kv_cache.block_size)
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        self._tenants = TenantShares()
        # In serving order.
        self._running: list[Request] = []
        self._waiting = WaitingQueue(kv_cache, clock)
        self._place_sharing = PlaceSharing(
            self._tenants, self._waiting, kv_cache, self._row_demand, self._chunk_size, limits.max_num_seqs
        )
        self._released: list[RequestId] = []
        self.speculation = Speculation(limits.speculation, kv_cache, limits.max_context_tokens)
        self._results = StepResults(kv_cache, self._row_demand, self.speculation, limits.max_context_tokens, clock)
        # The step that `advance` has counted as computed and whose tokens are not known.
        self._in_flight: SchedulerOutput | None = None
        # Requests whose chunk in the step behind the latest settled one is void.
        self._void: set[RequestId] = set()
        # The state in which the waiting requests were last examined (`_queue_state`); None: examine them again.
        self._seen_queue: tuple[int, list[RequestId]] | None = None
        self._num_looked_at_without_rows = 0
        # In the latest step.
        self.num_waiting_for_rows = 0
        # Since start-up.
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Number of requests in the running batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that hold no blocks: new or preempted."""
        return len(self._waiting)

    def has_requests(self) -> bool:
        """Whether a request is live or the runner has yet to drop a released one."""
        return bool(self._requests or self._released)

    def request(self, request_id: RequestId) -> Request:
        """Returns a live request. Raises KeyError for any other id."""
        return self._requests[request_id]

    def live_requests(self) -> list[Request]:
        """Returns all requests that have not finished."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Queues a request that has passed the admission checks."""
        request.is_private = any(self.encoder_cache.is_forgotten(item.key) for item in request.prompt.images)
        self._requests[request.request_id] = request
        self._tenants.add(request)
        self._row_demand.add(request)
        self._waiting.add(request)

    def schedule(self) -> SchedulerOutput:
        """Returns the next step. Pass it to `update`, `fail_step` or `advance` before the next call."""
        self._waiting.begin_step()
        step = StepInProgress(self.limits.max_num_batched_tokens)
        self._row_demand.begin_step()
        self.kv_cache.begin_step()
        for yielding, turn in self._place_sharing.yielding(self._running, len(self._requests)):
            self._preempt(yielding, turn)
        self._schedule_running(step)
        if not step.has_preempted:
            self._schedule_waiting(step)
        self.speculation.add_drafts(step.chunks, self._requests, step.token_budget)
        self.num_waiting_for_rows = step.num_without_rows
        released, self._released = tuple(self._released), []
        return step.output(released, self.encoder_cache.take_evicted(), self._row_demand.fetches)

    def may_run_ahead(self, output: SchedulerOutput) -> bool:
        """Whether the next step can be scheduled before this one's tokens are known.

        Drafts and grammars need them. A recurrent layer's state must never see a token that turns out to be another.
        """
        sampling = [chunk.request_id for chunk in output.chunks if chunk.samples]
        if self.limits.speculation.max_draft_tokens > 0 or self.kv_cache.has_states:
            return not sampling
        live = (self._requests.get(request_id) for request_id in sampling)
        return all(request is None or request.constraint is None for request in live)

    def advance(self, output: SchedulerOutput) -> None:
        """Counts a step as computed before its tokens are known. The step before it must be settled."""
        assert self._in_flight is None, "two steps in flight behind the scheduled one"
        self._in_flight = output
        for chunk in output.chunks:
            # A token of the step before may have ended the request, or made the chunk void.
            if (request := self._requests.get(chunk.request_id)) and chunk.request_id not in self._void:
                self._results.advance(request, chunk)
        self._void.clear()

    def update(self, output: SchedulerOutput, sampled: Iterable[SampledToken]) -> list[TokenUpdate]:
        """Applies a step's result: advances computed tokens, appends new tokens, removes finished requests."""
        self.kv_cache.end_step()
        if self._in_flight is not output:
            self.advance(output)
        self._in_flight = None
        tokens = tokens_by_request(sampled)
        self._void = {request_id for request_id, (token, *_) in tokens.items() if token.is_corrected}
        # A token is drawn again behind the next step on the device.
        self._waiting.end_step(output.num_scheduled_tokens, is_late=bool(self._void))
        updates = [update for chunk in output.chunks for update in self._take(chunk, tokens.get(chunk.request_id, []))]
        going_on = {one.request.request_id: one.request for one in updates if one.request.request_id in self._requests}
        self.speculation.begin_forced(going_on.values())
        return updates

    def fail_step(self, output: SchedulerOutput, behind: SchedulerOutput | None = None) -> list[Request]:
        """Ends the requests of a step that failed, and discards the blocks that it should have computed.

        `behind` is the step that was launched after it, if there is one: its results are dropped. A request with a
        chunk in it, or with blocks of the failed step, is preempted and starts again.
        """
        self._in_flight = None
        self._void.clear()
        self._waiting.fail_steps()
        dropped = {chunk.request_id for chunk in behind.chunks} if behind is not None else set()
        # A request may have ended after its chunk was launched.
        failed = [self._requests[chunk.request_id] for chunk in output.chunks if chunk.request_id in self._requests]
        for request in failed:
            self._finish(request, FinishReason.ABORT)
        for request in list(self._running):
            if request.request_id in dropped or self.kv_cache.holds_any_of_steps(request.request_id):
                self._preempt(request)
        self.kv_cache.withdraw_steps()
        return failed

    def abort(self, request_id: RequestId) -> Request | None:
        """Ends a request in any state and frees its blocks and rows at once. Returns None if it is not live."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    def rows_arrived(self, key: ContentKey, rows: RowRange, num_encoded_rows: int) -> bool:
        """Notes that rows reached the device; see `RowDemand.arrived`. Returns False if the caller must drop them."""
        return self._row_demand.arrived(key, rows, num_encoded_rows)

    def rows_failed(self, key: ContentKey, rows: RowRange, *, had_data: bool) -> list[Request]:
        """Removes and returns the requests that cannot continue without these rows, which failed to arrive."""
        self.encoder_cache.drop(key, rows)
        failed = [
            request
            for request in self._requests.values()
            if self._row_demand.takes_any(request, key, rows, had_data=had_data)
        ]
        for request in failed:
            self._finish(request, FinishReason.ABORT)
        return failed

    def forget(self, forgotten: Forgotten) -> None:
        """Removes images from the caches; their rows are evicted when the last request that needs them ends.

        Live requests with these images, and later requests that overlap with them, share nothing. The whole prefix
        cache is cleared: it does not record which blocks follow an image, and removals are rare.
        """
        for request in self._requests.values():
            if any(forgotten.includes(item.key.value) for item in request.prompt.images):
                request.is_private = True
        self.kv_cache.reset_prefix_cache()
        self.encoder_cache.forget(forgotten)

    def can_be_stalled(self) -> bool:
        """Whether requests are live and no rows are in flight: a step that does nothing is then followed by another."""
        return bool(self._requests) and not self.encoder_cache.has_arriving()

    def restart_all(self) -> Request:
        """Frees all blocks and claims on rows, so that the request served first can have any. Returns that request."""
        for request in list(self._running):
            self._preempt(request)
        waiting = self._waiting.first(len(self._waiting))
        for request in waiting:
            self._row_demand.restart(request)
        return waiting[0]

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks, rows and requests disagree."""
        self.kv_cache.check_integrity()
        self.encoder_cache.check_integrity()
        assert len(self._running) + len(self._waiting) == len(self._requests), "a request is nowhere or twice"
        if not self._requests:
            assert self.kv_cache.usage == 0, "blocks without a request"
            assert self.encoder_cache.num_uses() == 0, "rows are needed without a request"

    # Assembling a step.

    def _schedule_running(self, step: StepInProgress) -> None:
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            if not request.may_grow(self.limits.max_context_tokens):
                # The step in flight samples its last token.
                continue
            if step.token_budget > 0 and self._has_all_for_answer(request):
                self._schedule_answer_token(request, step)
                continue
            self._adopt_from_others(request)
            num_tokens = self._num_new_tokens(request, request.num_computed_tokens, step)
            if num_tokens > 1:
                behind = self._running[index:]
                num_tokens = self._chunk_size.beside_answers(request, num_tokens, step.token_budget, behind)
            if num_tokens > 0 and self._make_room(request, num_tokens, step):
                self._schedule_chunk(request, num_tokens, step)

    def _schedule_waiting(self, step: StepInProgress) -> None:
        """Admits requests from the head of the queue, and asks for rows of the first few that must wait."""
        if self._is_queue_as_before():
            step.num_without_rows += self._num_looked_at_without_rows
            return
        num_without_rows = step.num_without_rows
        self._admit_and_look_ahead(step)
        self._num_looked_at_without_rows = step.num_without_rows - num_without_rows
        self._seen_queue = None if self._row_demand.has_deferred else self._queue_state()

    def _is_queue_as_before(self) -> bool:
        """Whether the batch is full and nothing has changed since the waiting requests were last examined."""
        if len(self._running) < self.limits.max_num_seqs:
            return False
        return self._seen_queue == self._queue_state()

    def _queue_state(self) -> tuple[int, list[RequestId]]:
        """Returns everything that decides whether rows can be asked for the requests at the head of the queue."""
        return self.encoder_cache.version, [one.request_id for one in self._waiting.first(_NUM_LOOKED_AHEAD)]

    def _admit_and_look_ahead(self, step: StepInProgress) -> None:
        is_full = is_head_waiting = False
        num_looked_ahead = 0
        for request in self._waiting.first(self.limits.max_num_seqs):
            hit = self._waiting.prefix_hit(request, may_be_old=is_full)
            if self._waiting.must_miss_deadline(request, hit):
                self._finish(request, FinishReason.ABORT)
                step.expired.append(request.request_id)
                continue
            has_place = len(self._running) < self.limits.max_num_seqs
            if has_place and self.kv_cache.finds_more_next_step(request, hit):
                continue
            num_tokens = self._num_new_tokens(request, hit.num_tokens, step)
            may_start = not is_head_waiting or self._row_demand.has_asked_for_all(request, hit.num_tokens)
            is_head_waiting |= num_tokens == 0 and self._waiting.is_head(request)
            # Keep the remaining budget: if requests behind took it, an uncuttable span might wait forever.
            is_full = is_full or step.lacks_budget or len(self._running) >= self.limits.max_num_seqs
            # All known tokens must fit, not only this chunk; otherwise admission causes preemptions. A request that has
            # given its place in this step may have a token in flight, which must be known first.
            is_full = is_full or request.num_unknown_tokens > 0 or not self.kv_cache.can_admit(request, hit)
            if num_tokens > 0 and may_start and not is_full:
                self._admit(request, hit, step)
                self._schedule_chunk(request, num_tokens, step)
            elif is_full:
                num_looked_ahead += 1
                if num_looked_ahead == _NUM_LOOKED_AHEAD:
                    return

    def _adopt_from_others(self, request: Request) -> None:
        """Lets a request in the middle of its prompt adopt blocks that others have computed of the same prefix."""
        if not self.kv_cache.may_find_more(request):
            return
        hit = self.kv_cache.find_more(request)
        if hit.num_tokens > request.num_computed_tokens:
            self.kv_cache.adopt(request, hit)
            self._take_over(request, hit.num_tokens)

    def _take_over(self, request: Request, num_tokens: int) -> None:
        """Notes that the request's first `num_tokens` tokens are in shared blocks and need neither compute nor rows."""
        if request.num_preemptions == 0:
            request.usage.cached_prompt_tokens += num_tokens - request.num_computed_tokens
            self._row_demand.account_for_hit(request, num_tokens)
        request.num_computed_tokens = num_tokens
        request.num_shared_tokens = self.kv_cache.num_shared_tokens(request.request_id)
        self._row_demand.pass_computed(request)

    def _num_new_tokens(self, request: Request, start: int, step: StepInProgress) -> int:
        """Asks for missing rows and returns how many tokens from `start` on the budget and the present rows allow."""
        least = self._chunk_size.least(request, start)
        is_first = request.state is RequestState.RUNNING or self._waiting.is_head(request)
        may_displace = request.state is RequestState.RUNNING or (is_first and not self._running)
        self._row_demand.ask(request, start, least, is_first=is_first, may_displace=may_displace)
        runnable_stop = self._row_demand.runnable_stop(request, start)
        if runnable_stop < start + least:
            step.num_without_rows += 1
            return 0
        num_tokens = self._chunk_size.most(request, start, min(runnable_stop, start + step.token_budget))
        step.lacks_budget |= num_tokens == 0 < step.token_budget and not self.limits.deterministic
        return num_tokens

    def _has_all_for_answer(self, request: Request) -> bool:
        """Whether the request's one next token needs neither blocks nor rows, as in most steps of most requests."""
        return self.kv_cache.has_slot_for_answer(request) and self._row_demand.has_passed_images(request)

    def _schedule_answer_token(self, request: Request, step: StepInProgress) -> None:
        start = request.num_computed_tokens
        write_start = max(start, request.num_shared_tokens)
        block_start, block_ids = self.kv_cache.take_table_changes(request.request_id)
        step.add(ScheduledChunk(request.request_id, start, 1, write_start, block_start, block_ids, samples=True))

    def _make_room(self, request: Request, num_tokens: int, step: StepInProgress) -> bool:
        """Preempts from the end of the running batch until blocks are free; False if that hit the request itself."""
        while not self.kv_cache.can_allocate(request, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            step.has_preempted = True
            if victim is request:
                return False
        return True

    def _schedule_chunk(self, request: Request, num_tokens: int, step: StepInProgress) -> None:
        self.kv_cache.allocate(request, num_tokens)
        start = request.num_computed_tokens
        samples = start + num_tokens == request.num_tokens
        write_start = max(start, request.num_shared_tokens)
        block_start, block_ids = self.kv_cache.take_table_changes(request.request_id)
        sliding = self.kv_cache.take_sliding_changes(request.request_id)
        states = self.kv_cache.take_state_use(request, num_tokens)
        step.add(
            ScheduledChunk(
                request.request_id,
                start,
                num_tokens,
                write_start,
                block_start,
                block_ids,
                samples,
                sliding,
                states=states,
            )
        )
        self.kv_cache.publish(request, start + num_tokens)

    def _admit(self, request: Request, hit: PrefixHit, step: StepInProgress) -> None:
        self._waiting.remove(request)
        self._tenants.start(request)
        request.state = RequestState.RUNNING
        enqueue(self._running, request)
        self.kv_cache.admit(request, hit)
        if request.num_preemptions == 0:
            request.usage.queue_time_s = self._clock() - request.arrival_s
        self._take_over(request, hit.num_tokens)
        self._row_demand.renew(request)
        step.admitted.append(AdmittedRequest.of(request))

    def _preempt(self, request: Request, turn: int | None = None) -> None:
        """Returns a running request to its place in the queue; all its tokens are computed again or found later.

        With `turn`, its place is the one of this turn.
        """
        self._running.remove(request)
        self._tenants.stop(request)
        self._free_blocks(request)
        self._row_demand.restart(request)
        request.turn = request.turn if turn is None else turn
        request.state = RequestState.WAITING
        request.num_computed_tokens = 0
        request.num_shared_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    # Applying a result.

    def _take(self, chunk: ScheduledChunk, sampled: list[SampledToken]) -> list[TokenUpdate]:
        """Appends a chunk's sampled tokens, and ends the request if they are its last."""
        request = self._requests.get(chunk.request_id)
        # Aborted, or ended by a token of the step before.
        if request is None or request.num_unknown_tokens == 0:
            return []
        updates = self._results.take(request, chunk, sampled)
        if updates and updates[-1].finish_reason is not None:
            self._finish(request, updates[-1].finish_reason)
        return updates

    def _finish(self, request: Request, reason: FinishReason) -> None:
        is_running = request.state is RequestState.RUNNING
        (self._running if is_running else self._waiting).remove(request)
        self._tenants.end(request, has_run=is_running or request.num_preemptions > 0)
        self._free_blocks(request)
        self._row_demand.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.num_unknown_tokens = 0
        self.speculation.forget(request.request_id)
        del self._requests[request.request_id]

    def _free_blocks(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self._released.append(request.request_id)
        self.kv_cache.free(request.request_id)
