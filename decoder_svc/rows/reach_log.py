"""Errors of the encoder's calls, and log lines about encoders that cannot be reached.

A line is written when calls begin to fail and when they succeed again, not for each call: a decoder asks many times a
second. The texts of gRPC go to the log only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
import grpc.aio

from decoder_svc.rows.encoder_wire import connection_error, own_error
from lookonce.errors import LookonceError
from lookonce.logs import get_logger

_log = get_logger(__name__)

# Seconds between two warnings, for calls that fail and succeed in turn.
_INTERVAL_S = 10.0


class ReachLog:
    """The state of one target's encoders as its calls show it. Use it on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Code of the last warning; None when calls have succeeded since.
        self._failing: grpc.StatusCode | None = None
        self._warned_s: float | None = None

    def note_answer(self) -> None:
        """Takes a call that an encoder answered."""
        if self._failing is not None:
            self._failing = None
            _log.info("the encoder service answers again")

    def error_of(self, error: grpc.aio.AioRpcError, timeout_s: float, *, is_expected: bool = False) -> LookonceError:
        """Returns the encoder's own error, or UnavailableError for an error of the connection, which is noted.

        `is_expected`: the caller has another way, so the failure of this one is no news.
        """
        own = own_error(error)
        if own is not None:
            return own
        now_s = self._clock()
        is_known = error.code() is self._failing or is_expected
        if is_known or (self._warned_s is not None and now_s - self._warned_s < _INTERVAL_S):
            _log.debug("encoder call failed", code=error.code().name, details=error.details())
        else:
            self._failing, self._warned_s = error.code(), now_s
            _log.warning("encoder call failed", code=error.code().name, details=error.details())
        return connection_error(error, timeout_s)
