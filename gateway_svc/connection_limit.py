"""The bound on open connections, which keeps clients that send nothing from shutting others out."""

from __future__ import annotations

import errno
import resource
import socket
from contextlib import suppress
from typing import Any, Protocol

from lookonce.errors import ConfigurationError

# Most connections, without TLS and with it: then each has a buffer of 256 KiB. Beyond this many, start more gateways.
_MOST = 4096
_MOST_WITH_TLS = 1024
# Open files of the gateway itself: connections to decoders and image hosts, metrics, libraries.
_RESERVED_FILES = 256
# With fewer connections than this, a gateway would refuse ordinary callers.
_LEAST = 64
# Connections that the kernel keeps until they are accepted.
_QUEUE = 2048
_NO_FILES = (errno.EMFILE, errno.ENFILE)


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
        # Those that the server has accepted and not begun to serve, by the number of their file. A TLS handshake may be
        # in between.
        self._accepted: dict[int, _Accepted] = {}

    def accepted(self, accepted: socket.socket) -> None:
        """Counts a connection that the server has accepted, and ends one if there are too many."""
        # The number of a file is free again once its connection is closed.
        self._forget(accepted.fileno())
        connection = self._accepted[accepted.fileno()] = _Accepted(accepted)
        self._num_open += 1
        self._waiting[connection] = None
        if self._num_open > self._max_connections:
            self._forget_failed()
        if self._num_open > self._max_connections:
            self.end_longest()

    def end_longest(self) -> bool:
        """Ends the connection that has waited longest. Returns False if none waits."""
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        del self._waiting[longest]
        longest.end()
        return True

    def opened(self, connection: Closable, file: int) -> None:
        """Notes that the server begins to serve the connection that it accepted with this file."""
        accepted = self._accepted.pop(file, None)
        if accepted is None:
            self._num_open += 1
        else:
            self._waiting.pop(accepted, None)
        self._waiting[connection] = None

    def waits(self, connection: Closable) -> None:
        """Notes that a connection's answer is complete, so that it waits for its next request."""
        self._waiting[connection] = None

    def works(self, connection: Closable) -> None:
        """Notes that a whole request has arrived, which will be answered."""
        self._waiting.pop(connection, None)

    def closed(self, connection: Closable) -> None:
        """Forgets a connection that was opened. Call it once for each."""
        self._num_open -= 1
        self._waiting.pop(connection, None)

    def _forget_failed(self) -> None:
        """Forgets accepted connections that are closed and were never served: nobody tells of a failed handshake."""
        for file in [file for file, accepted in self._accepted.items() if accepted.is_closed]:
            self._forget(file)

    def _forget(self, file: int) -> None:
        accepted = self._accepted.pop(file, None)
        if accepted is not None:
            self._waiting.pop(accepted, None)
            self._num_open -= 1


class _Accepted:
    """A connection before the server begins to serve it."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted

    @property
    def is_closed(self) -> bool:
        """Whether the server has given the connection up."""
        return self._socket.fileno() == -1

    def end(self) -> None:
        """Makes the handshake fail, so that the server closes the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class LimitedListener(socket.socket):
    """A listening socket that counts the connections it accepts."""

    def __init__(self, family: int, limit: ConnectionLimit) -> None:
        # asyncio sends small pieces at once only on sockets of this protocol. Otherwise each request on a connection
        # that was used before waits 40 ms for an acknowledgement.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._limit = limit

    def listen(self, backlog: int = _QUEUE) -> None:
        """Listens with a queue for bursts. The event loop asks for as many as it accepts before it does other work."""
        super().listen(max(backlog, _QUEUE))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection. If the process has no file left for it, one that waits is ended."""
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno in _NO_FILES and self._limit.end_longest():
                # Its file is free as soon as the event loop has closed it.
                raise BlockingIOError from None
            raise
        self._limit.accepted(accepted)
        return accepted, address


def allowed_connections(*, has_tls: bool) -> int:
    """Raises this process's limit of open files to what it may have, and returns the number of connections to allow.

    Raises ConfigurationError if the limit is too low to serve anybody.
    """
    most = _MOST_WITH_TLS if has_tls else _MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return most
    if soft < _LEAST + _RESERVED_FILES:
        raise ConfigurationError(
            f"this process may open {soft} files, and a gateway needs at least {_LEAST + _RESERVED_FILES}; raise its "
            "limit (ulimit -n, LimitNOFILE)"
        )
    return min(most, soft - _RESERVED_FILES)
