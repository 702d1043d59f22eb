"""The text of an answer as it is generated, for the client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self

import grpc
import grpc.aio
from opentelemetry import trace

from lookonce import tracing
from lookonce.errors import EmbeddingNotCachedError, LookonceError
from lookonce.generation import Delta, Generation, TokenLogprobs, Usage
from lookonce.sdk.answers import Transcript
from lookonce.sdk.calls import AsyncCalls
from lookonce.sdk.messages import PreparedPrompt
from lookonce.sdk.replies import parsed
from lookonce.sdk.retries import Attempts
from lookonce.sdk.uploads import Turn
from lookonce.status_codes import from_rpc_error


class AsyncTextStream(AsyncIterator[str]):
    """The text of an answer, piece by piece as it is generated.

    Leaving the `async with` block or calling `aclose` ends the request early.
    """

    def __init__(
        self,
        calls: AsyncCalls,
        attempts: Attempts,
        metadata: tracing.Metadata,
        prepare: Callable[[], Awaitable[PreparedPrompt]],
        start: Callable[[PreparedPrompt, bool], Any],
        supply: Callable[[PreparedPrompt, EmbeddingNotCachedError], Awaitable[None]],
        turn: Turn,
        span: trace.Span,
    ) -> None:
        """`prepare` hashes the images, `start` begins a call, `supply` adds images the server lacks.

        Ends `turn` and `span`.

        The second argument of `start` says whether the call waits for a server that can be reached.
        """
        self._calls = calls
        self._attempts = attempts
        self._metadata = metadata
        self._prepare = prepare
        self._start = start
        self._supply = supply
        self._turn = turn
        self._span = span
        self._transcript = Transcript()
        self._call: Any = None
        self._parts = self._read()

    @property
    def generation(self) -> Generation:
        """The whole answer. Raises InternalError before the iteration has ended."""
        return self._transcript.generation()

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """The log-probabilities of the tokens so far, one entry a token; empty unless asked for."""
        return self._transcript.logprobs

    @property
    def usage(self) -> Usage:
        """Token accounting. Raises InternalError before the iteration has ended."""
        return self.generation.usage

    @property
    def usage_so_far(self) -> Usage:
        """Token accounting up to the latest piece: the prompt's, and the tokens generated so far."""
        return self._transcript.usage_so_far

    async def aclose(self) -> None:
        """Ends the request and the iteration. Must not be called while another task waits for the next piece."""
        await self._parts.aclose()
        tracing.end(self._span)

    def _end(self, error: LookonceError) -> None:
        """Ends the request and the span. A task that waits for the next piece gets AbortedError."""
        if self._call is not None:
            self._call.cancel()
        tracing.end(self._span, error)

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yields all parts of the answer: text, reasoning and calls of functions. The iteration has the text alone."""
        while True:
            try:
                yield await self._next()
            except StopAsyncIteration:
                return

    async def __anext__(self) -> str:
        while True:
            if text := (await self._next()).text:
                return text

    async def _next(self) -> Delta:
        with tracing.ended_by(self._span, StopAsyncIteration):
            return await anext(self._parts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _read(self) -> AsyncGenerator[Delta]:
        prepared = await self._prepare()
        pause_s: float | None
        try:
            while True:
                try:
                    async with aclosing(self._deltas(prepared)) as deltas:
                        async for delta in deltas:
                            yield delta
                    self._attempts.succeeded()
                    return
                except EmbeddingNotCachedError as error:
                    if self._transcript.has_content:
                        raise
                    await self._supply(prepared, error)
                    pause_s = 0.0
                except LookonceError as error:
                    pause_s = None if self._transcript.has_content else self._attempts.pause_s(error)
                    if pause_s is None:
                        raise
                await self._calls.pause(pause_s)
                self._transcript = Transcript()
        finally:
            self._turn.end()

    async def _deltas(self, prepared: PreparedPrompt) -> AsyncGenerator[Delta]:
        call = self._call = self._start(prepared, self._attempts.wait_for_ready)
        try:
            async for response in call:
                self._turn.end()
                if delta := self._transcript.add(parsed(response)):
                    yield delta
            self._transcript.generation()
        except grpc.aio.AioRpcError as error:
            raise self._calls.with_id(from_rpc_error(error), self._metadata) from None
        except asyncio.CancelledError:
            self._calls.check_cancelled()
            raise
        finally:
            # Has no effect on a finished call.
            call.cancel()
            # The call refers to its request, and so to the images.
            self._call = None
