"""The engine: one thread that schedules, runs and updates, and its two-way bridge to the event loop.

`submit` and `abort` come from the event loop through an unbounded inbox that is bounded by the number of live requests;
outputs go back in one call per step. Every submitted request gets exactly one terminal answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from decoder_svc.engine.delivery import Answer, Delivery
from decoder_svc.engine.engine_interface import EngineCounters, EngineLimits, EngineLoad
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.rows.embedding_fetcher import EmbeddingFetcher
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import DEFAULT_SCOPE, CacheScope, Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import RowFetch, SchedulerOutput, TokenUpdate
from lookonce.errors import (
    ContextTooLongError,
    DeadlineError,
    EmbeddingNotCachedError,
    InternalError,
    InvalidParameterError,
    LookonceError,
    OverloadedError,
    UnavailableError,
)
from lookonce.families.base import Mask
from lookonce.forgotten import Forgotten

logger = logging.getLogger(__name__)

# Of a new step in the mean of steps' durations: the last ten or so count.
_STEP_WEIGHT = 0.1
# A step that fails takes its requests with it; so many in a row and the engine is taken to be broken.
_MAX_CONSECUTIVE_FAILURES = 3
# A step that hangs does not keep the process from ending.
_STOP_TIMEOUT_S = 10.0
_STOPPING = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class _FailedRows:
    fetch: RowFetch
    error: LookonceError


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Forget:
    """There is something to forget: one message however many images, or the inbox would have no bound."""


_Message = Request | FetchedRows | _FailedRows | _Abort | _Forget | None


class Engine:
    """Continuous batching over one model runner."""

    def __init__(
        self,
        runner: ModelRunnerBase,
        scheduler: Scheduler,
        fetcher: EmbeddingFetcher,
        limits: EngineLimits,
        max_live_requests: int,
        longest_hold_s: float = 0.0,
        max_step_s: float = math.inf,
    ) -> None:
        """More than `max_live_requests` are refused; `longest_hold_s` is what `Delivery` says.

        A step that takes longer than `max_step_s` makes the engine unhealthy until it ends.
        """
        self.limits = limits
        self._runner = runner
        self._scheduler = scheduler
        self._fetcher = fetcher
        self._max_live_requests = max_live_requests
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._forget_lock = threading.Lock()
        # What the engine thread has not been told yet.
        self._to_forget: Forgotten | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Event loop only.
        self._delivery = Delivery(longest_hold_s)
        # Engine thread only: answers of the step in hand.
        self._outbox: list[tuple[RequestId, Answer]] = []
        self._num_failures = 0
        self._made_progress = False
        # Mean duration of the latest steps, seconds.
        self._step_s = 0.0
        self._heartbeat = Heartbeat(max_step_s)
        self._is_running = False
        self._has_died = False

    # Event loop side.

    def start(self) -> None:
        """Starts the engine thread; call it on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._is_running = True
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its current step; requests still alive get UNAVAILABLE."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("an engine step is left to the end of the process")
        await asyncio.sleep(0)
        self._delivery.close(UnavailableError(_STOPPING))
        await self._fetcher.close()

    @property
    def is_healthy(self) -> bool:
        """Whether the engine thread is alive, steps succeed, and none of them hangs."""
        return self._is_running and self._thread.is_alive() and self._heartbeat.is_fresh

    @property
    def has_died(self) -> bool:
        """Whether the engine thread has ended by itself: only a new process helps."""
        return self._has_died

    def submit(
        self,
        request_id: RequestId,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_scope: CacheScope = DEFAULT_SCOPE,
    ) -> OutputStream:
        """Admits a request and returns its outputs.

        Raises ContextTooLongError when it can never fit, OverloadedError when too many requests are alive,
        InvalidParameterError for an id that is alive, UnavailableError when the engine is down.
        """
        if not self.is_healthy:
            raise UnavailableError("the engine does not answer; retry on another replica")
        self._check_fits(prompt, params)
        if request_id in self._delivery:
            raise InvalidParameterError("request_id", "another request with this id is running")
        if len(self._delivery) >= self._max_live_requests:
            raise OverloadedError(f"{len(self._delivery)} requests are running or waiting, the limit")
        if params.seed is None and not params.is_greedy:
            params = replace(params, seed=secrets.randbits(64))
        request = Request(
            request_id,
            prompt,
            params,
            arrival_s=time.monotonic(),
            priority=priority,
            deadline_s=deadline_s,
            cache_scope=cache_scope,
        )
        stream = self._delivery.open(request_id)
        self._inbox.put(request)
        return stream

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request in any state with this reason; unknown and ended ones are fine."""
        self._inbox.put(_Abort(request_id, reason))

    def forget(self, forgotten: Forgotten) -> None:
        """Drops rows, keys and values of these images; requests that are using them go on and leave none behind."""
        with self._forget_lock:
            is_waiting, self._to_forget = self._to_forget is not None, forgotten.and_also(self._to_forget or forgotten)
        if not is_waiting:
            self._inbox.put(_Forget())

    def load(self) -> EngineLoad:
        """Figures of this moment for routers and autoscalers."""
        return EngineLoad(
            running_requests=self._scheduler.num_running,
            waiting_requests=max(0, len(self._delivery) - self._scheduler.num_running),
            waiting_for_embeddings=self._scheduler.num_waiting_for_rows,
            kv_cache_usage=self._scheduler.kv_cache.usage,
            encoder_cache_rows=self._scheduler.encoder_cache.num_reserved_rows,
            step_s=self._step_s,
        )

    @property
    def attention_backend(self) -> str:
        """What computes attention, chosen when the model was loaded."""
        return self._runner.backend.name

    def counters(self) -> EngineCounters:
        """Sums since the start for monitoring."""
        prefix_cache = self._scheduler.kv_cache.stats
        return EngineCounters(
            preemptions=self._scheduler.num_preemptions,
            prefix_query_tokens=prefix_cache.num_query_tokens,
            prefix_hit_tokens=prefix_cache.num_hit_tokens,
            draft_tokens=self._scheduler.speculation.num_drafted,
            accepted_draft_tokens=self._scheduler.speculation.num_accepted,
        )

    def _check_fits(self, prompt: Prompt, params: SamplingParams) -> None:
        num_tokens = len(prompt.token_ids) + params.max_tokens
        if num_tokens > self.limits.max_context_tokens:
            raise ContextTooLongError(
                f"prompt ({len(prompt.token_ids)}) and max_tokens ({params.max_tokens}) are {num_tokens} tokens, "
                f"the limit is {self.limits.max_context_tokens}"
            )
        for item in prompt.images:
            if item.num_rows > self.limits.encoder_cache_size_rows:
                raise ContextTooLongError(
                    f"an image has {item.num_rows} embedding rows, this decoder holds "
                    f"{self.limits.encoder_cache_size_rows}"
                )

        longest = max((span.length for span in prompt.mutual_spans), default=0)
        # Beside one token of each other running request, or it might wait as long as those last.
        limit = self.limits.max_batched_tokens - (self.limits.max_running_requests - 1)
        if prompt.mutual_spans and longest > limit:
            raise ContextTooLongError(
                f"{longest} tokens of the prompt see each other and are computed in one step, which takes {limit}"
            )
        if prompt.mask is Mask.PROMPT and prompt.num_image_tokens > self.limits.encoder_cache_size_rows:
            raise ContextTooLongError(
                f"the prompt's images have {prompt.num_image_tokens} embedding rows, needed at the same time; "
                f"this decoder holds {self.limits.encoder_cache_size_rows}"
            )

    # Engine thread.

    def _run(self) -> None:
        reason = _STOPPING
        try:
            while self._take_messages():
                self._step()
                self._flush()
        except BaseException:
            logger.exception("the engine stopped")
            reason = "the engine stopped; retry on another replica"
            self._has_died = True
        finally:
            # From here on nothing is submitted, so the streams that are closed here are all.
            self._is_running = False
            self._flush()
            self._call_on_loop(self._delivery.close, UnavailableError(reason))

    def _take_messages(self) -> bool:
        """Handles everything in the inbox; waits for something when there is nothing to run or say. False: stop."""
        while True:
            has_work = bool(self._outbox) or (self._made_progress and self._scheduler.has_requests())
            if not has_work:
                self._heartbeat.rest()
            try:
                message = self._inbox.get(block=not has_work)
            except queue.Empty:
                self._heartbeat.begin_round()
                return True
            self._heartbeat.begin_round()
            if message is None:
                return False
            self._handle(message)
            self._made_progress = True

    def _handle(self, message: Request | FetchedRows | _FailedRows | _Abort | _Forget) -> None:
        if isinstance(message, Request):
            self._scheduler.add(message)
        elif isinstance(message, FetchedRows):
            if self._scheduler.rows_arrived(message.key, message.rows, message.source):
                self._runner.put_rows(message)
        elif isinstance(message, _FailedRows):
            self._fail_rows(message)
        elif isinstance(message, _Forget):
            with self._forget_lock:
                forgotten, self._to_forget = self._to_forget, None
            assert forgotten is not None, "one message for each time that there is something to forget"
            self._scheduler.forget(forgotten)
        else:
            request = self._scheduler.abort(message.request_id)
            if request is not None:
                output = RequestOutput((), (), message.reason, replace(request.usage))
                self._outbox.append((request.request_id, output))

    def _fail_rows(self, message: _FailedRows) -> None:
        had_data = message.fetch.data is not None
        fetch = message.fetch
        for request in self._scheduler.rows_failed(fetch.key, fetch.rows, had_data=had_data):
            error = message.error
            if isinstance(error, EmbeddingNotCachedError):
                indexes = [i for i, item in enumerate(request.prompt.images) if item.key == fetch.key]
                error = EmbeddingNotCachedError(error.message, indexes=indexes)
            self._outbox.append((request.request_id, error))

    def _step(self) -> None:
        began_s = time.monotonic()
        output = self._scheduler.schedule()
        self._made_progress = bool(output.chunks or output.fetches or output.released or output.expired)
        self._outbox.extend((request_id, _too_late()) for request_id in output.expired)
        self._start_fetches(output)
        self._outbox.extend(
            (admitted.request_id, self._admission(admitted.request_id))
            for admitted in output.admitted
            if admitted.num_prompt_tokens == len(admitted.token_ids)
        )
        try:
            sampled = self._runner.execute_model(output)
        except Exception:
            self._fail_step(output)
            return
        if output.chunks:
            # A step that only tells the runner who has left says nothing of its health.
            self._num_failures = 0
        self._outbox.extend(_outputs(self._scheduler.update(output, sampled)))
        if output.chunks:
            took_s = time.monotonic() - began_s
            self._step_s += _STEP_WEIGHT * (took_s - self._step_s) if self._step_s else took_s

    def _admission(self, request_id: RequestId) -> RequestOutput:
        return RequestOutput((), (), None, replace(self._scheduler.request(request_id).usage))

    def _fail_step(self, output: SchedulerOutput) -> None:
        """The step's requests fail, everybody else goes on."""
        incident = uuid.uuid4().hex
        logger.exception("an engine step failed, incident %s", incident)
        for request in self._scheduler.fail_step(output):
            self._outbox.append((request.request_id, InternalError(f"internal error {incident}")))
        self._num_failures += 1
        if self._num_failures >= _MAX_CONSECUTIVE_FAILURES:
            raise RuntimeError(f"{self._num_failures} engine steps failed in a row")

    def _start_fetches(self, output: SchedulerOutput) -> None:
        for fetch in output.fetches:
            self._call_on_loop(self._start_fetch, fetch)

    def _start_fetch(self, fetch: RowFetch) -> None:
        """In the context of the call that needs the rows first."""
        context = self._delivery.context(fetch.request_id)
        context.run(self._fetcher.start, fetch, self._inbox.put, self._put_failed_rows)

    def _put_failed_rows(self, fetch: RowFetch, error: LookonceError) -> None:
        self._inbox.put(_FailedRows(fetch, error))

    def _flush(self) -> None:
        if self._outbox:
            answers, self._outbox = self._outbox, []
            self._call_on_loop(self._delivery.deliver, answers)

    def _call_on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "start() comes first"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _too_late() -> DeadlineError:
    return DeadlineError("the deadline comes before the first token could")


def _outputs(updates: Sequence[TokenUpdate]) -> Iterator[tuple[RequestId, RequestOutput]]:
    """One for each request of a step, however many tokens it got."""
    for request_id, group in groupby(updates, key=lambda update: update.request.request_id):
        of_request = tuple(group)
        tokens = [update.token for update in of_request]
        last = of_request[-1]
        yield (
            request_id,
            RequestOutput(
                token_ids=tuple(token.token_id for token in tokens),
                logprobs=tuple(token.logprobs for token in tokens if token.logprobs is not None),
                finish_reason=last.finish_reason,
                usage=replace(last.request.usage),
                was_draft=tuple(update.was_draft for update in of_request),
            ),
        )
