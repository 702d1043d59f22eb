"""Asks a decoder for the embeddings of many inputs, a few at a time, and writes each as JSON when it comes."""

from __future__ import annotations

import asyncio
import base64
import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from gateway_svc.answers import Ask, gathered
from gateway_svc.apis.api import Context
from gateway_svc.errors import renamed
from lookonce.errors import DeadlineError, InvalidInputError, LookonceError, OverloadedError, UnavailableError
from lookonce.generation import Pooling, PromptEmbedding, RequestOptions, Usage
from lookonce.sdk.in_threads import readers
from lookonce.threads import run_in_thread

_AT_ONCE = 16
# Pause before an input is asked for again without advice, seconds.
_LEAST_PAUSE_S = 0.05
_TOO_LATE = "the time was over before all inputs were computed; send fewer at a time"


class Vector(NamedTuple):
    """One embedding as a value of JSON."""

    text: bytes
    usage: Usage


@dataclass(frozen=True, slots=True)
class VectorForm:
    """The wishes of a request about its embeddings."""

    pooling: Pooling
    is_base64: bool

    def written(self, values: Sequence[float]) -> bytes:
        """Returns a vector as a value of JSON. Nine digits tell any float32 from all others."""
        if self.is_base64:
            return b'"' + base64.b64encode(struct.pack(f"<{len(values)}f", *values)) + b'"'
        return ("[" + ",".join(map("%.9g".__mod__, values)) + "]").encode()


async def vectors(
    ask: Ask, form: VectorForm, context: Context, placed: Callable[[LookonceError, int], LookonceError]
) -> list[Vector]:
    """Returns the embedding of each prompt. If one fails, the others end and its error is raised.

    `placed` names the input in an error. If a decoder has answered, or has other inputs of the list, it is asked again
    for those that it had no room for; so a quota slows a list down and does not refuse it.
    """
    asking = _Asking(ask, form, context, placed)
    return await gathered(asking.one(index) for index in range(ask.num_answers))


def placed_in(error: LookonceError, names: dict[str, str], place: str) -> LookonceError:
    """Returns a decoder's error with the caller's name of the field, or without one, with the place of the input."""
    found = renamed(error, names)
    if "field" in found.metadata or not isinstance(error, InvalidInputError) or error.text_is_foreign:
        return found
    named = LookonceError(f"{place}: {error.message}", metadata={**error.metadata, "field": place})
    named.code, named.reason, named.retry_after_s = error.code, error.reason, error.retry_after_s
    return named


class _Asking:
    """The calls for one request."""

    def __init__(
        self, ask: Ask, form: VectorForm, context: Context, placed: Callable[[LookonceError, int], LookonceError]
    ) -> None:
        self._ask, self._form, self._context, self._placed = ask, form, context, placed
        # The retries of a list are made here: those of the client are shared by all callers.
        self._client = context.client if ask.num_answers == 1 else context.client.with_options(max_retries=0)
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._deadline_s = time.monotonic() + context.timeout_s
        self._num_done = 0
        # Calls that the decoder has now.
        self._num_asked = 0

    async def one(self, index: int) -> Vector:
        """Returns the embedding of one prompt."""
        async with self._at_once:
            found = await self._found(index)
            self._num_done += 1
            text = await run_in_thread(readers(), lambda: self._form.written(found.embedding))
        self._context.take_memory(len(text))
        return Vector(text, found.usage)

    async def _found(self, index: int) -> PromptEmbedding:
        while True:
            remaining_s = self._deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineError(_TOO_LATE)
            options = cast(RequestOptions, self._ask.options_of(index, self._context.request_id, remaining_s))
            self._num_asked += 1
            try:
                return await self._client.embed(self._ask.prompt_of(index), pooling=self._form.pooling, **options)
            except (OverloadedError, UnavailableError) as error:
                refusal = error
            except DeadlineError:
                raise DeadlineError(_TOO_LATE) from None
            except LookonceError as error:
                raise self._placed(error, index) from None
            finally:
                self._num_asked -= 1
            if not self._num_done and not self._num_asked:
                raise refusal
            pause_s = max(refusal.retry_after_s or 0.0, _LEAST_PAUSE_S) * random.uniform(1.0, 1.5)
            if time.monotonic() + pause_s >= self._deadline_s:
                raise DeadlineError(_TOO_LATE)
            # Its place stays taken, so fewer are asked for at the same time.
            await asyncio.sleep(pause_s)
