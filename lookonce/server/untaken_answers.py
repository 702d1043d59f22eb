"""Keeps answers that clients did not take out of the log.

gRPC logs an error with a traceback when a call is cancelled while its answer is being sent, so each client could fill
the log. It logs the same for an answer that is too large to send, which is a fault of the service and stays.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

import grpc.aio

_LOGGER = logging.getLogger("grpc._cython.cygrpc")
_ERROR = "ExecuteBatchError"

# Whether gRPC can send the answer of the current call. gRPC logs in the task that ran the call's handler.
_can_be_sent: ContextVar[bool] = ContextVar("can_be_sent", default=False)


def note_answer(answer: bytes, max_bytes: int) -> None:
    """Notes the answer of the current call before gRPC sends it. `max_bytes` is the largest one that gRPC sends."""
    _can_be_sent.set(len(answer) <= max_bytes)


def drop_from_log() -> None:
    """Drops gRPC's log records of answers that could have been sent. Further calls have no effect."""
    _LOGGER.addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    kind = record.exc_info[0] if record.exc_info else None
    is_of_answer = kind is not None and issubclass(kind, grpc.aio.InternalError) and kind.__name__ == _ERROR
    return not (is_of_answer and _can_be_sent.get())
