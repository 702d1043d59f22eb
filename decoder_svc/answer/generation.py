"""One request in the engine, from submission to its answer. Whatever way it is left, the engine is rid of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from decoder_svc.answer.generated_text import GeneratedText, TextIncrement
from decoder_svc.engine.engine_interface import Engine, OutputStream
from decoder_svc.engine.output_stream import slices
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.prompt.preparation import PreparedRequest
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.scheduling.request import CacheScope, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage
from lookonce import tracing
from lookonce.errors import InternalError

# Tokens whose text is made before the event loop looks elsewhere; a reader who was away may find thousands at once.
_TOKENS_AT_ONCE = 64
# An answer takes its time from the engine to its reader, which callers wait for as for the rest; what takes longer is
# the reader's own time.
_LONGEST_READING_S = 1.0


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What the engine is told beside prompt and parameters."""

    # Lower runs earlier.
    priority: int
    # When the call came in, monotonic clock, seconds.
    arrival_s: float
    # When its answer is no longer wanted, monotonic clock, seconds; None: never.
    deadline_s: float | None
    # With whom it shares what the prefix cache holds.
    cache_scope: CacheScope


class Generation:
    """A request that the engine has admitted."""

    def __init__(self, stream: OutputStream, text: GeneratedText, arrival_s: float) -> None:
        """`arrival_s` is before submission, monotonic clock; the time between counts as waiting."""
        self._stream = stream
        self._outputs = aiter(stream)
        # Came in place of an admission: the request was ended while it waited.
        self._early_end: RequestOutput | None = None
        self._text = text
        self._arrival_s = arrival_s
        self._prepared_s = time.monotonic() - arrival_s
        # What the engine said last.
        self._latest = RequestUsage()
        # Set with the last increment.
        self.finish_reason: FinishReason | None = None
        # Seconds from the first step that computed a token of it to the last increment, of which no more than a second
        # may be the reader's; None: it was aborted.
        self.served_s: float | None = None

    @property
    def usage(self) -> RequestUsage:
        """The engine's latest figures; tokens after a stop string do not count."""
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
        """Waits until the scheduler has admitted the request, or it was ended before; returns prompt-side usage."""
        output = await self._next()
        self._latest = output.usage
        if output.finish_reason is not None:
            self._early_end = output
        return self.usage

    async def increments(self) -> AsyncIterator[TextIncrement]:
        """What is generated, as it comes. The last increment has the finish reason; a failure raises its error."""
        while True:
            for number, output in enumerate(slices(self._early_end or await self._next(), _TOKENS_AT_ONCE)):
                if number:
                    await asyncio.sleep(0)
                increment = self._text.push(output)
                self._latest = output.usage
                self.finish_reason = increment.finish_reason
                if increment.finish_reason not in (None, FinishReason.ABORT):
                    now_s = time.monotonic()
                    ended_s = min(now_s, (self._stream.ended_s or now_s) + _LONGEST_READING_S)
                    self.served_s = ended_s - self._arrival_s - self.usage.queue_time_s
                yield increment
                if increment.finish_reason is not None:
                    return

    def record_spans(self) -> None:
        """What became of it so far, as parts of the call's trace."""
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
    metrics: DecoderMetrics,
    when_ended: Callable[[], None] = lambda: None,
) -> AsyncIterator[Generation]:
    """Submits a request; on leaving the block, for whatever reason, the engine frees what it still holds.

    `when_ended` is called when the engine has given its last output, which may be long before it has been read.
    Raises OverloadedError and ContextTooLongError.
    """
    stream = engine.submit(
        request_id,
        prepared.prompt,
        prepared.params,
        priority=options.priority,
        deadline_s=options.deadline_s,
        cache_scope=options.cache_scope,
    )
    stream.when_ended(when_ended)
    text = GeneratedText(tokenizer, prepared.sampling)
    generation = Generation(stream, text, options.arrival_s)
    try:
        yield generation
    finally:
        engine.abort(request_id, generation.finish_reason or FinishReason.ABORT)
        metrics.observe(generation.usage)
        generation.record_spans()
