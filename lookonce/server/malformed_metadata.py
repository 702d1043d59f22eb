"""Limits gRPC's log lines about metadata and paths that are not UTF-8.

gRPC logs an error with the raw bytes and a traceback each time when it reads such a value, four times for one header of
a call and once for its path. A client without a token could so fill the log, and write into it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_LOGGER = logging.getLogger("grpc._cython.cygrpc")
_MESSAGE = "Invalid encoding on"
# Time between two lines, seconds.
_PAUSE_S = 60.0


class MalformedMetadata:
    """A filter that lets one short line pass in a while, with the number of values that gRPC has logged since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = 0.0
        self._num_values = 0

    def __call__(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is logged. Takes the caller's bytes and the traceback out of it."""
        # Handlers' own errors of this kind end at the border and do not get here.
        is_of_path = record.exc_info is not None and isinstance(record.exc_info[1], UnicodeDecodeError)
        if not is_of_path and not str(record.msg).startswith(_MESSAGE):
            return True
        self._num_values += 1
        if self._clock() < self._next_s:
            return False
        record.msg = f"metadata or paths are not UTF-8, {self._num_values} values since the last such line"
        record.args, record.exc_info, record.exc_text = (), None, None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        self._next_s, self._num_values = self._clock() + _PAUSE_S, 0
        return True


_filter = MalformedMetadata()


def limit_in_log() -> None:
    """Limits the lines in this process. Further calls have no effect."""
    _LOGGER.addFilter(_filter)
