"""When readers of answers hear of them: at once of what begins or ends one, at a pace of what comes between.

A message costs the process and its caller about as much CPU time with one token as with ten, and the engine thread
pays for it: they share an interpreter. So streams together are woken some hundred times a second, not once for each
token. With few streams that is less than a step takes, and nothing is held back. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import RequestOutput
from lookonce.errors import LookonceError

Answer: TypeAlias = RequestOutput | LookonceError

# Between two wake-ups, for each stream that is to be woken. A message took 0.1 to 0.2 ms of CPU on both sides together
# (2 × AMD EPYC, 2026-11-22), so this is 5 to 10 % of one CPU.
_S_PER_STREAM = 0.002
# Readers woken before the event loop looks at its sockets again.
_NUM_WOKEN_TOGETHER = 4


class Delivery:
    """The streams of all live requests."""

    def __init__(self, longest_hold_s: float) -> None:
        """No token is held back longer than `longest_hold_s`; 0: none is."""
        self._longest_hold_s = longest_hold_s
        self._streams: dict[RequestId, OutputStream] = {}
        # Have outputs that their readers were not told of.
        self._held: dict[RequestId, OutputStream] = {}
        self._to_wake: deque[OutputStream] = deque()
        self._timer: asyncio.TimerHandle | None = None
        # Monotonic clock.
        self._released_s = 0.0

    def __len__(self) -> int:
        """Requests without a terminal answer."""
        return len(self._streams)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._streams

    def open(self, request_id: RequestId) -> OutputStream:
        """The stream of a new request."""
        stream = self._streams[request_id] = OutputStream()
        return stream

    def context(self, request_id: RequestId) -> contextvars.Context:
        """Of the call that the request answers; an empty one when it has ended."""
        stream = self._streams.get(request_id)
        return contextvars.Context() if stream is None else stream.context

    def deliver(self, answers: Iterable[tuple[RequestId, Answer]]) -> None:
        """Takes what a step produced, in order. Answers to requests that have theirs are dropped."""
        for request_id, answer in answers:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            if isinstance(answer, LookonceError):
                stream.fail(answer)
            elif answer.finish_reason is None and answer.token_ids and stream.has_tokens:
                stream.push(answer)
                self._held[request_id] = stream
                continue
            else:
                stream.push(answer)
                stream.wake()
            self._held.pop(request_id, None)
            if stream.is_closed:
                del self._streams[request_id]
        self._release_when_due()

    def close(self, error: LookonceError) -> None:
        """Ends every stream that is left with the error."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._held.clear()

    def _release_when_due(self) -> None:
        if not self._held or self._timer is not None:
            return
        hold_s = min(self._longest_hold_s, len(self._held) * _S_PER_STREAM)
        delay_s = self._released_s + hold_s - time.monotonic()
        if delay_s <= 0:
            self._release()
        else:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._release)

    def _release(self) -> None:
        self._timer = None
        self._released_s = time.monotonic()
        is_waking = bool(self._to_wake)
        self._to_wake.extend(self._held.values())
        self._held.clear()
        if not is_waking:
            self._wake_some()

    def _wake_some(self) -> None:
        """A few at a time, so that nobody else on the event loop waits for all of them."""
        for _ in range(min(_NUM_WOKEN_TOGETHER, len(self._to_wake))):
            self._to_wake.popleft().wake()
        if self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_some)
