"""Messages between the event loop and the engine thread, and the inbox that carries them to the thread.

The inbox has no bound of its own. It stays small because each live request puts a bounded number of messages into it,
and the request gate bounds the live requests.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, TypeAlias

from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput
from decoder_svc.scheduling.sampling_params import TokenConstraint
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.errors import LookonceError
from lookonce.forgotten import Forgotten

STOPPING = "the server is shutting down"

# An output of a request, or the error that ends it.
Answer: TypeAlias = RequestOutput | LookonceError


@dataclass(frozen=True, slots=True)
class FailedRows:
    """A fetch of embedding rows that ended with an error."""

    fetch: RowFetch
    error: LookonceError


@dataclass(frozen=True, slots=True)
class Abort:
    """Asks the engine to end a request with this reason."""

    request_id: RequestId
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Stop:
    """Asks the engine thread to end."""


@dataclass(frozen=True, slots=True)
class ChangeAdapter:
    """Asks the engine to load the adapter of a folder, or to drop one that no live request has."""

    # AdapterChanged has the same.
    number: int
    name: str
    # Empty: the adapter is dropped.
    folder: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """An adapter that waits to be added, or the error for which it will not be."""

    change: ChangeAdapter
    # Made by the runner, which takes it back.
    prepared: Any
    error: LookonceError | None


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """The outcome of one ChangeAdapter: the error for which nothing has changed, or None."""

    number: int
    error: LookonceError | None


@dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome of compiling a request's constraint, or the error that ends the request."""

    request_id: RequestId
    outcome: TokenConstraint | LookonceError


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one step, in order. At most one per request has a finish reason or is an error."""

    by_request: tuple[tuple[RequestId, Answer], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message of the engine. Requests that are still alive get `error`."""

    error: LookonceError
    # Whether the engine failed; otherwise it was told to stop.
    has_died: bool = False


# Messages that an inbox takes one by one; the last two come from threads that work for the engine.
Queued: TypeAlias = Request | FetchedRows | FailedRows | Abort | ChangeAdapter | Stop | Compiled | AdapterRead
ToEngineThread: TypeAlias = Request | FetchedRows | FailedRows | Abort | ChangeAdapter | Stop | Forgotten
ToEventLoop: TypeAlias = RowFetch | Answers | AdapterChanged | Ended


@dataclass(frozen=True, slots=True)
class _Forget:
    """Stands in the queue for all images to forget that the thread has not taken yet."""


class Inbox:
    """Queue of messages for the engine thread. Any thread may put; only the engine thread takes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Queued | _Forget] = queue.SimpleQueue()
        self._forget_lock = threading.Lock()
        # Images to forget that the engine thread has not taken yet.
        self._to_forget: Forgotten | None = None

    def put(self, message: Queued) -> None:
        """Appends a message to the queue."""
        self._queue.put(message)

    def put_forgotten(self, forgotten: Forgotten) -> None:
        """Adds images to forget. All that wait together are one message, so that their number cannot fill the inbox."""
        with self._forget_lock:
            is_waiting = self._to_forget is not None
            self._to_forget = forgotten.and_also(self._to_forget or forgotten)
        if not is_waiting:
            self._queue.put(_Forget())

    def take(self, timeout_s: float | None) -> Queued | Forgotten | None:
        """Removes and returns the oldest message, or None when none comes in time.

        Waits at most `timeout_s` seconds; None waits for any time.
        """
        try:
            message = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if not isinstance(message, _Forget):
            return message
        with self._forget_lock:
            forgotten, self._to_forget = self._to_forget, None
        assert forgotten is not None, "the queue holds one _Forget for each time that there is something to forget"
        return forgotten
