"""The text of an answer as it is generated, for the synchronous client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import grpc
import grpc.aio
from opentelemetry import trace

from lookonce import tracing
from lookonce.errors import EmbeddingNotCachedError, LookonceError
from lookonce.generation import Delta, Generation, TokenLogprobs, Usage
from lookonce.sdk.answers import Transcript
from lookonce.sdk.calls import SyncCalls
from lookonce.sdk.retries import Attempts
from lookonce.sdk.uploads import Turn


class TextStream(Iterator[str]):
    """The text of an answer, piece by piece as it is generated. Not thread-safe.

    Leaving the `with` block or calling `close` ends the request early.
    """

    def __init__(
        self,
        calls: SyncCalls,
        attempts: Attempts,
        metadata: tracing.Metadata,
        start: Callable[[bool], Any],
        supply: Callable[[EmbeddingNotCachedError], None],
        turn: Turn,
        span: trace.Span,
    ) -> None:
        """`start` begins a call with the current prompt, `supply` adds images that the server lacks.

        Ends `turn` and `span`.

        The argument of `start` says whether the call waits for a server that can be reached.
        """
        self._calls = calls
        self._attempts = attempts
        self._metadata = metadata
        self._start = start
        self._supply = supply
        self._turn = turn
        self._span = span
        self._transcript = Transcript()
        self._closed = False
        with tracing.ended_by(span, StopIteration):
            self._call = start(False)
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

    def close(self) -> None:
        """Ends the request and the iteration."""
        self._closed = True
        self._call.cancel()
        self._end(None)

    def _end(self, error: LookonceError | None) -> None:
        """Ends the span, if that has not happened yet."""
        tracing.end(self._span, error)

    def deltas(self) -> Iterator[Delta]:
        """Yields all parts of the answer: text, reasoning and calls of functions. The iteration has the text alone."""
        while True:
            try:
                yield self._next()
            except StopIteration:
                return

    def __next__(self) -> str:
        while True:
            if text := self._next().text:
                return text

    def _next(self) -> Delta:
        with tracing.ended_by(self._span, StopIteration):
            return next(self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Iterator[Delta]:
        pause_s: float | None
        try:
            while True:
                try:
                    yield from self._deltas()
                    self._attempts.succeeded()
                    return
                except EmbeddingNotCachedError as error:
                    if self._transcript.has_content:
                        raise
                    self._supply(error)
                    pause_s = 0.0
                except LookonceError as error:
                    pause_s = None if self._transcript.has_content else self._attempts.pause_s(error)
                    if pause_s is None:
                        raise
                self._calls.pause(pause_s)
                self._transcript = Transcript()
                self._call = self._start(self._attempts.wait_for_ready)
        finally:
            self._turn.end()

    def _deltas(self) -> Iterator[Delta]:
        try:
            for response in self._call:
                self._turn.end()
                if delta := self._transcript.add(response):
                    yield delta
        except grpc.RpcError as error:
            # The call is its own exception. Its traceback would refer to this frame, and so to the call and the images.
            error.__traceback__ = None
            if not self._closed:
                raise self._calls.with_id(self._calls.error_of(error), self._metadata) from None
        except LookonceError:
            self._call.cancel()
            raise
        else:
            self._transcript.generation()
