"""The outputs of one request, between the engine and the coroutine that answers the caller."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator

from decoder_svc.scheduling.request_output import RequestOutput, RequestUsage, TokenLogprobs
from lookonce.errors import LookonceError


class OutputStream:
    """An async iterator of RequestOutput. All methods belong to the event loop.

    The first output is the admission: no tokens, prompt-side usage. The last one has a finish reason; a request that
    fails raises its LookonceError instead, once. Outputs with tokens that a reader has not read yet reach it as one.
    """

    def __init__(self) -> None:
        # Unread outputs from before the first unread token, and those from it on.
        self._outputs: deque[RequestOutput] = deque()
        self._backlog = _Backlog()
        self._error: LookonceError | None = None
        # Whether the terminal answer has been given. Set here only.
        self.is_closed = False
        self._has_tokens = False
        self._changed = asyncio.Event()
        self._ended_s: float | None = None
        # The context of the submitting call. Work for the request in other tasks runs in it, so that logs and spans
        # carry the call's id.
        self.context = contextvars.copy_context()

    @property
    def ended_s(self) -> float | None:
        """Time of the terminal answer, monotonic clock, seconds; None before. Its reader may get to it much later."""
        return self._ended_s

    @property
    def has_tokens(self) -> bool:
        """Whether an output with tokens has been pushed."""
        return self._has_tokens

    def push(self, output: RequestOutput) -> None:
        """Appends an output, without waking the reader; ignored after the terminal answer."""
        if self.is_closed:
            return
        self._has_tokens = self._has_tokens or bool(output.token_ids)
        if self._backlog or output.token_ids:
            self._backlog.add(output)
        else:
            self._outputs.append(output)
        if output.finish_reason is not None:
            self._close()

    def wake(self) -> None:
        """Wakes the reader, who then finds the outputs that were pushed."""
        self._changed.set()

    def fail(self, error: LookonceError) -> None:
        """Ends the stream with an error and wakes the reader; ignored after the terminal answer."""
        if not self.is_closed:
            self._error = error
            self._close()
            self._changed.set()

    def _close(self) -> None:
        self.is_closed = True
        self._ended_s = time.monotonic()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while not (self._outputs or self._backlog):
            if self._error is not None:
                # The traceback of the error refers to the call's frames, and these refer to the stream. If the stream
                # kept the error, the cycle would keep the prompt's images until the next garbage collection.
                failure, self._error = [self._error], None
                raise failure.pop()
            if self.is_closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._outputs.popleft() if self._outputs else self._backlog.take()


class _Backlog:
    """Outputs that wait for their reader, kept as one. Adding one costs its own length, however many are waiting."""

    def __init__(self) -> None:
        self._num_outputs = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._was_draft: list[bool] = []
        self._last: RequestOutput | None = None
        # The latest that an output had.
        self._usage: RequestUsage | None = None

    def __bool__(self) -> bool:
        return self._last is not None

    def add(self, output: RequestOutput) -> None:
        """Appends an output and takes its end and usage as the latest."""
        self._num_outputs += 1
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._was_draft.extend(output.was_draft or (False,) * len(output.token_ids))
        self._last = output
        self._usage = output.usage or self._usage

    def take(self) -> RequestOutput:
        """Returns the outputs as one, with the end and the usage of the last, and forgets them. There must be one."""
        last = self._last
        assert last is not None, "no output is waiting"
        if self._num_outputs > 1:
            last = RequestOutput(
                token_ids=tuple(self._token_ids),
                logprobs=tuple(self._logprobs),
                finish_reason=last.finish_reason,
                usage=self._usage,
                was_draft=tuple(self._was_draft),
            )
        self._num_outputs, self._last, self._usage = 0, None, None
        for waiting in (self._token_ids, self._logprobs, self._was_draft):
            waiting.clear()
        return last


def slices(output: RequestOutput, num_tokens: int) -> Iterator[RequestOutput]:
    """Cuts an output into outputs of at most `num_tokens` tokens; the last one has the finish reason."""
    if len(output.token_ids) <= num_tokens:
        yield output
        return
    for start in range(0, len(output.token_ids), num_tokens):
        stop = start + num_tokens
        yield RequestOutput(
            token_ids=output.token_ids[start:stop],
            logprobs=output.logprobs[start:stop],
            finish_reason=output.finish_reason if stop >= len(output.token_ids) else None,
            usage=output.usage,
            was_draft=output.was_draft[start:stop],
        )
