"""Several answers to one prompt. Each is a request of its own in the engine; together they are one to the caller.

The engine computes the prompt once: equal prompts share their blocks from the step on in which the first of them is
scheduled (ADR 4). So nothing is copied, and each answer has its own seed and ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from decoder_svc.answer.generated_text import TextIncrement
from decoder_svc.answer.generation import GenerationOptions, SubmittedRequest, generating
from decoder_svc.engine.engine import Engine
from decoder_svc.prompt.preparation import PreparedRequest
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import RequestUsage


class Prepared(Protocol):
    """A request that is ready for the engine, once for each answer."""

    def choice(self, index: int) -> PreparedRequest:
        """Returns the request for the answer with this index."""


# An increment of the choice with this index, or None when the scheduler has admitted the choice.
_Event = tuple[int, TextIncrement | None]


class Choices:
    """The answers of one request that has been submitted to the engine."""

    def __init__(self, submitted: Sequence[SubmittedRequest]) -> None:
        self.submitted = tuple(submitted)
        self._events = _merged([_events(index, one) for index, one in enumerate(submitted)])

    @property
    def usage(self) -> RequestUsage:
        """The token accounting of all answers, in which the prompt counts once."""
        return combined([one.usage for one in self.submitted])

    async def admission(self) -> RequestUsage:
        """Waits until the scheduler has admitted the first answer or has ended it, and returns the usage."""
        await anext(self._events)
        return self.usage

    async def increments(self) -> AsyncIterator[tuple[int, TextIncrement]]:
        """Yields the answers as they are generated, each with its index. The first failure of an answer is raised."""
        async for index, increment in self._events:
            if increment is not None:
                yield index, increment

    async def close(self) -> None:
        """Stops waiting for the engine. Call it when no more increments are read."""
        await self._events.aclose()


def combined(usages: Sequence[RequestUsage]) -> RequestUsage:
    """Returns the usage of a request from those of its answers.

    One answer computed the prompt, and the others found its blocks: what the prompt took is what that one took. The
    encode of an image can be counted by any of them, and then the one that waited for its rows counts them as cached.
    """
    if len(usages) == 1:
        return usages[0]
    computed = min(usages, key=lambda usage: (usage.prompt_tokens == 0, usage.cached_prompt_tokens))
    num_rows = computed.encoded_image_tokens + computed.cached_image_tokens + computed.skipped_image_tokens
    encoded = min(num_rows, sum(usage.encoded_image_tokens for usage in usages))
    cached = max(0, computed.cached_image_tokens - (encoded - computed.encoded_image_tokens))
    begun = [usage for usage in usages if usage.queue_time_s > 0]
    answered = [usage for usage in usages if usage.time_to_first_token_s > 0]
    return replace(
        computed,
        encoded_image_tokens=encoded,
        cached_image_tokens=cached,
        skipped_image_tokens=num_rows - encoded - cached,
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage in usages),
        queue_time_s=min((usage.queue_time_s for usage in begun), default=0.0),
        time_to_first_token_s=min((usage.time_to_first_token_s for usage in answered), default=0.0),
    )


@asynccontextmanager
async def generating_choices(
    engine: Engine,
    request_ids: Sequence[RequestId],
    prepared: Prepared,
    options: GenerationOptions,
    tokenizer: TextTokenizer,
) -> AsyncIterator[Choices]:
    """Submits a request once for each id, and aborts what has not ended when the block is left, like `generating`."""
    async with AsyncExitStack() as stack:
        submitted = [
            await stack.enter_async_context(generating(engine, request_id, prepared.choice(index), options, tokenizer))
            for index, request_id in enumerate(request_ids)
        ]
        choices = Choices(submitted)
        stack.push_async_callback(choices.close)
        yield choices


async def _events(index: int, submitted: SubmittedRequest) -> AsyncIterator[_Event]:
    await submitted.admission()
    yield index, None
    async for increment in submitted.increments():
        yield index, increment
    # The engine does not know stop strings. It would go on until the other answers have ended, too.
    submitted.leave()


async def _merged(parts: Sequence[AsyncIterator[_Event]]) -> AsyncGenerator[_Event]:
    """Yields the events of all parts as they come."""
    if len(parts) == 1:
        async for only in parts[0]:
            yield only
        return
    waiting = {asyncio.create_task(_next(part)): part for part in parts}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                part = waiting.pop(future)
                event = future.result()
                if event is not None:
                    waiting[asyncio.create_task(_next(part))] = part
                    yield event
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(part: AsyncIterator[_Event]) -> _Event | None:
    """Returns the next event of a part, or None at its end."""
    return await anext(part, None)
