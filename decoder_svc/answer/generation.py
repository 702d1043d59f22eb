"""One request in the engine, from its submission to the end of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from decoder_svc.answer.generated_text import GeneratedText, TextIncrement
from decoder_svc.engine.engine import Engine
from decoder_svc.engine.output_stream import OutputStream, slices
from decoder_svc.prompt.preparation import PreparedRequest
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.scheduling.request import CacheScope, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage
from lookonce import tracing
from lookonce.errors import InternalError

# Tokens detokenized before the event loop gets a turn. A reader that was behind may find thousands of tokens at once.
_TOKENS_AT_ONCE = 64
# Delivery from the engine to the reader is part of the time that callers wait, and counts as serving time up to this
# bound. What exceeds it is the time of a slow reader.
_LONGEST_READING_S = 1.0


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """A request's scheduling options: everything the engine needs beside prompt and sampling parameters."""

    # Lower runs earlier.
    priority: int
    # Arrival of the call, monotonic clock, seconds.
    arrival_s: float
    # Deadline of the call, monotonic clock, seconds; None: no deadline.
    deadline_s: float | None
    # The requests with which this one shares blocks of the prefix cache.
    cache_scope: CacheScope
    # The requests of several tenants take turns.
    tenant: str = ""


class SubmittedRequest:
    """A request that has been submitted to the engine, and its answer as text."""

    def __init__(
        self,
        stream: OutputStream,
        text: GeneratedText,
        arrival_s: float,
        submitted_s: float,
        abort: Callable[[FinishReason], None],
    ) -> None:
        """The call arrived at `arrival_s` and was submitted at `submitted_s`, monotonic clock.

        The engine counts from then on; the time before counts as time in the queue. `abort` ends the request in the
        engine, if it has not ended there.
        """
        self.stream = stream
        self._abort = abort
        self._has_left = False
        self._outputs = aiter(stream)
        # The only output of a request that was ended before its admission.
        self._early_end: RequestOutput | None = None
        self._text = text
        self._arrival_s = arrival_s
        self._prepared_s = submitted_s - arrival_s
        # The usage of the engine's latest output.
        self._latest = RequestUsage()
        # Set with the last increment.
        self.finish_reason: FinishReason | None = None
        # Seconds from the first step that computed a token of the request to its last increment, of which at most
        # `_LONGEST_READING_S` are the reader's. None: it has not ended or was aborted.
        self.served_s: float | None = None

    @property
    def usage(self) -> RequestUsage:
        """The engine's latest usage. Tokens after a stop string do not count."""
        usage = self._latest
        is_begun = usage.queue_time_s > 0
        has_token = self._text.num_tokens > 0
        return replace(
            usage,
            completion_tokens=self._text.num_tokens,
            accepted_draft_tokens=self._text.num_accepted_drafts,
            queue_time_s=usage.queue_time_s + (self._prepared_s if is_begun else 0.0),
            time_to_first_token_s=usage.time_to_first_token_s + (self._prepared_s if has_token else 0.0),
        )

    async def admission(self) -> RequestUsage:
        """Waits until the scheduler has admitted the request or has ended it, and returns the prompt-side usage."""
        output = await self._next()
        self._latest = output.usage or self._latest
        if output.finish_reason is not None:
            self._early_end = output
        return self.usage

    async def increments(self) -> AsyncIterator[TextIncrement]:
        """Yields the answer as it is generated. The last increment has the finish reason; a failure is raised."""
        while True:
            for number, output in enumerate(slices(self._early_end or await self._next(), _TOKENS_AT_ONCE)):
                if number:
                    await asyncio.sleep(0)
                increment = self._text.push(output)
                self._latest = output.usage or self._latest
                self.finish_reason = increment.finish_reason
                if increment.finish_reason not in (None, FinishReason.ABORT):
                    now_s = time.monotonic()
                    ended_s = min(now_s, (self.stream.ended_s or now_s) + _LONGEST_READING_S)
                    self.served_s = ended_s - self._arrival_s - self.usage.queue_time_s
                yield increment
                if increment.finish_reason is not None:
                    return

    def leave(self) -> None:
        """Ends the request in the engine and adds its phases to the call's trace, the first time."""
        if not self._has_left:
            self._has_left = True
            self._abort(self.finish_reason or FinishReason.ABORT)
            self._record_spans()

    def _record_spans(self) -> None:
        """Adds the phases that the request has begun (queue, prefill, decode) to the call's trace."""
        now_s, usage = time.monotonic(), self.usage
        began_s = self._arrival_s + usage.queue_time_s if usage.queue_time_s > 0 else now_s
        first_token_s = self._arrival_s + usage.time_to_first_token_s if usage.time_to_first_token_s > 0 else now_s
        tracing.record("generate.queue", self._arrival_s + self._prepared_s, began_s)
        if usage.queue_time_s > 0:
            tracing.record(
                "generate.prefill",
                began_s,
                first_token_s,
                prompt_tokens=usage.prompt_tokens,
                cached_prompt_tokens=usage.cached_prompt_tokens,
                image_tokens=usage.image_tokens,
            )
        if usage.time_to_first_token_s > 0:
            tracing.record("generate.decode", first_token_s, now_s, completion_tokens=usage.completion_tokens)

    async def _next(self) -> RequestOutput:
        try:
            return await anext(self._outputs)
        except StopAsyncIteration:
            raise InternalError("a request ended without an answer") from None


@asynccontextmanager
async def generating(
    engine: Engine,
    request_id: RequestId,
    prepared: PreparedRequest,
    options: GenerationOptions,
    tokenizer: TextTokenizer,
) -> AsyncIterator[SubmittedRequest]:
    """Submits a request, and aborts it in the engine when the block is left for any reason.

    Raises what `Engine.submit` raises.
    """
    submitted_s = time.monotonic()
    stream = engine.submit(
        request_id,
        prepared.prompt,
        prepared.params,
        priority=options.priority,
        deadline_s=options.deadline_s,
        cache_scope=options.cache_scope,
        tenant=options.tenant,
    )
    text = GeneratedText(tokenizer, prepared.sampling, prepared.form)
    submitted = SubmittedRequest(stream, text, options.arrival_s, submitted_s, partial(engine.abort, request_id))
    try:
        yield submitted
    finally:
        submitted.leave()
