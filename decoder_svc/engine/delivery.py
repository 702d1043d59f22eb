"""Paces the wake-ups of readers: the first and the last output of a request at once, the rest batched.

A message costs the process and its caller about as much CPU time with one token as with ten, and the engine thread
shares the interpreter with that work. So all streams together are woken some hundred times a second, not once for each
token. With few streams the pace is shorter than a step, and nothing is held back. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections import deque
from collections.abc import Iterable

from decoder_svc.engine.messages import Answer
from decoder_svc.engine.output_stream import OutputStream
from decoder_svc.scheduling.request import RequestId
from lookonce.errors import LookonceError

# Time between two wake-ups, per stream to wake. A message took 0.1 to 0.2 ms of CPU on both sides together
# (2 × AMD EPYC, 2026-11-22), so messages take 5 to 10 % of one CPU.
_S_PER_STREAM = 0.002
# Readers woken in one turn of the event loop, so that sockets and other tasks get their turns in between.
_NUM_WOKEN_TOGETHER = 4


class Delivery:
    """The streams of all live requests."""

    def __init__(self, longest_hold_s: float) -> None:
        """No token is held back longer than `longest_hold_s` seconds; 0: every token is delivered at once."""
        self._longest_hold_s = longest_hold_s
        self._streams: dict[RequestId, OutputStream] = {}
        # Streams with outputs whose readers have not been woken.
        self._held: dict[RequestId, OutputStream] = {}
        # Streams released from `_held` that wait for their turn in `_wake_some`.
        self._to_wake: deque[OutputStream] = deque()
        self._timer: asyncio.TimerHandle | None = None
        # Time of the last release, monotonic clock, which may have started with this machine.
        self._released_s = -math.inf

    def __len__(self) -> int:
        """Returns the number of requests without a terminal answer."""
        return len(self._streams)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._streams

    def open(self, request_id: RequestId) -> OutputStream:
        """Returns the stream of a new request."""
        stream = self._streams[request_id] = OutputStream()
        return stream

    def context(self, request_id: RequestId) -> contextvars.Context:
        """Returns the context of the call that submitted the request, or an empty one when the request has ended."""
        stream = self._streams.get(request_id)
        return contextvars.Context() if stream is None else stream.context

    def deliver(self, answers: Iterable[tuple[RequestId, Answer]]) -> None:
        """Hands a step's answers, in order, to their streams. Answers to requests that have ended are dropped."""
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
        """Ends every open stream with the error."""
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
        """Wakes a few readers and schedules itself for the rest."""
        for _ in range(min(_NUM_WOKEN_TOGETHER, len(self._to_wake))):
            self._to_wake.popleft().wake()
        if self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_some)
