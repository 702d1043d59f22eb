"""The engine as the event loop sees it: submit and abort requests, read their outputs, start and stop the steps.

Messages go to the core, which runs the steps (core.py), and come back with `call_soon_threadsafe`, one per step. Every
submitted request gets exactly one terminal answer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from dataclasses import replace

from decoder_svc.engine.core import EngineCore, EngineFacts
from decoder_svc.engine.delivery import Delivery
from decoder_svc.engine.figures import EngineCounters, EngineLimits, EngineLoad
from decoder_svc.engine.messages import (
    STOPPING,
    Abort,
    AdapterChanged,
    Answers,
    ChangeAdapter,
    Ended,
    FailedRows,
    Stop,
    ToEventLoop,
)
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.rows.embedding_fetcher import EmbeddingFetcher
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import DEFAULT_SCOPE, CacheScope, Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.errors import ContextTooLongError, InvalidParameterError, LookonceError, UnavailableError
from lookonce.families.base import Mask
from lookonce.forgotten import Forgotten

logger = logging.getLogger(__name__)

# Age up to which `stop` waits for the current step. An older one is taken to hang, and must not keep the process from
# ending.
_STOP_TIMEOUT_S = 10.0


class Engine:
    """Continuous batching over one model runner. All methods belong to the event loop, except where one says more."""

    def __init__(self, core: EngineCore, fetcher: EmbeddingFetcher, longest_hold_s: float = 0.0) -> None:
        """No token is held back longer than `longest_hold_s` seconds to share a wake-up with others."""
        self._core = core
        self._fetcher = fetcher
        self._delivery = Delivery(longest_hold_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Changes of adapters whose outcome has not come, by their numbers.
        self._changes: dict[int, asyncio.Future[None]] = {}
        self._change_numbers = itertools.count()

    @property
    def facts(self) -> EngineFacts:
        """The constants of the engine with its model."""
        return self._core.facts

    @property
    def limits(self) -> EngineLimits:
        """Capacity limits, fixed at start-up."""
        return self._core.facts.limits

    def start(self) -> None:
        """Begins to run steps; call it on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._core.start(self._post)

    async def stop(self) -> None:
        """Ends the engine after its current step; requests still alive get UnavailableError."""
        self._core.put(Stop())
        if not await asyncio.to_thread(self._core.join, max(0.0, _STOP_TIMEOUT_S - self._core.round_s)):
            logger.warning("an engine step is left to the end of the process")
        await asyncio.sleep(0)
        self._end_all(UnavailableError(STOPPING))
        await self._fetcher.close()
        await asyncio.to_thread(self._core.close)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine runs and no step hangs. Any thread may ask."""
        return self._core.is_healthy

    @property
    def has_died(self) -> bool:
        """Whether the engine ended on an error: only a new process helps. Any thread may ask."""
        return self._core.has_died

    def submit(
        self,
        request_id: RequestId,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_scope: CacheScope = DEFAULT_SCOPE,
        tenant: str = "",
    ) -> OutputStream:
        """Queues a request and returns its outputs. `deadline_s` is on the monotonic clock; None: no deadline.

        The requests of several tenants take turns.

        Raises UnavailableError when the engine is down, ContextTooLongError for a request that can never fit, and
        InvalidParameterError for an id that is alive. The number of requests is the request gate's to limit.
        """
        if not self.is_healthy:
            raise UnavailableError("the engine does not answer; retry on another replica")
        self._check_fits(prompt, params)
        if request_id in self._delivery:
            raise InvalidParameterError("request_id", "another request with this id is running")
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
            tenant=tenant,
        )
        stream = self._delivery.open(request_id)
        self._core.put(request)
        return stream

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request in any state and frees what it holds. Its last output says `reason`.

        Unknown and ended ids are ignored.
        """
        self._core.put(Abort(request_id, reason))

    def forget(self, forgotten: Forgotten) -> None:
        """Drops the rows, keys and values of these images. Any thread may call it.

        Requests that use the images continue, and leave nothing of them in the caches.
        """
        self._core.put_forgotten(forgotten)

    async def change_adapter(self, name: str, folder: str, fingerprint: str) -> None:
        """Loads the adapter of a folder, which must have this fingerprint, or drops it if `folder` is empty.

        Raises ModelFolderError for an adapter that does not fit the model, and UnavailableError when the engine ends.
        """
        number = next(self._change_numbers)
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes[number] = outcome
        try:
            if not self.is_healthy:
                raise UnavailableError("the engine does not answer; retry on another replica")
            self._core.put(ChangeAdapter(number, name, folder, fingerprint))
            await outcome
        finally:
            del self._changes[number]

    def load(self) -> EngineLoad:
        """The current load; it may change between two calls."""
        return self._core.load(len(self._delivery))

    def counters(self) -> EngineCounters:
        """Sums since the start, for monitoring."""
        return self._core.counters()

    def _check_fits(self, prompt: Prompt, params: SamplingParams) -> None:
        num_tokens = len(prompt.token_ids) + params.num_context_tokens
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
        # The span must fit beside one token of each other running request, or it could wait until all of them end.
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

    def _post(self, message: ToEventLoop) -> None:
        """Hands a message of the core to the event loop; the only method that runs on another thread."""
        assert self._loop is not None, "start() comes first"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: ToEventLoop) -> None:
        if isinstance(message, Answers):
            self._delivery.deliver(message.by_request)
        elif isinstance(message, AdapterChanged):
            self._end_change(message.number, message.error)
        elif isinstance(message, Ended):
            self._end_all(message.error)
        else:
            self._start_fetch(message)

    def _end_all(self, error: LookonceError) -> None:
        """Ends all requests, and all changes of adapters."""
        self._delivery.close(error)
        for number in list(self._changes):
            self._end_change(number, error)

    def _end_change(self, number: int, error: LookonceError | None) -> None:
        """Ends a change of adapters, unless nobody waits for it any more."""
        outcome = self._changes.get(number)
        if outcome is None or outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)

    def _start_fetch(self, fetch: RowFetch) -> None:
        """Runs in the context of the call that needs the rows first, so that logs and spans carry its id."""
        context = self._delivery.context(fetch.request_id)
        context.run(self._fetcher.start, fetch, self._core.put, self._put_failed_rows)

    def _put_failed_rows(self, fetch: RowFetch, error: LookonceError) -> None:
        self._core.put(FailedRows(fetch, error))
