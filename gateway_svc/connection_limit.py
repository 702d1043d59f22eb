"""The bound on open connections, which keeps clients that send nothing from shutting others out."""

from __future__ import annotations

import resource
from typing import Protocol

# A connection without TLS takes about 10 KB, one with TLS about 50 KB. Beyond this many, start more gateways.
_MOST = 4096
# Open files of the gateway itself: connections to decoders and image hosts, metrics, libraries.
_RESERVED_FILES = 512


class Closable(Protocol):
    """A connection that can be ended at once."""

    def end(self) -> None:
        """Ends the connection without an answer."""


class ConnectionLimit:
    """Bounds open connections: beyond the limit, the one that has waited longest for a whole request is ended.

    A connection whose request is being answered is never ended for another one. If all are, the new one is.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._num_open = 0
        # Without a whole request; the one that has waited longest is first.
        self._waiting: dict[Closable, None] = {}

    def opened(self, connection: Closable) -> None:
        """Counts a new connection and ends one if there are too many."""
        self._num_open += 1
        self._waiting[connection] = None
        if self._num_open > self._max_connections:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.end()

    def waits(self, connection: Closable) -> None:
        """Notes that a connection's answer is complete, so that it waits for its next request."""
        self._waiting[connection] = None

    def works(self, connection: Closable) -> None:
        """Notes that a whole request has arrived."""
        self._waiting.pop(connection, None)

    def closed(self, connection: Closable) -> None:
        """Forgets a connection. Call it once for each."""
        self._num_open -= 1
        self._waiting.pop(connection, None)


def allowed_connections() -> int:
    """Raises this process's limit of open files to what it may have, and returns the number of connections to allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(1, min(_MOST, soft - _RESERVED_FILES))
