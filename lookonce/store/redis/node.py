"""One Redis server and the connections to it.

redis-py opens the sockets: it knows URLs, TLS and certificates. Commands go through Exchange. Every failure is a
RedisTroubleError with a bounded reason. This module does not know that there may be other servers.

redis-py has no public way to the socket of a connection, so two of its private attributes are used, `_sock` and
`_parser`, in `_socket_of`, `_is_silent` and `_log_in` alone. pyproject.toml therefore admits only minor versions up to
the latest one that was tested; 6.0, 6.4, 7.4 and 8.1 were (2026-11-23). tests/lookonce/store/redis/test_node.py fails
where a version lacks the attributes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import redis
import redis.connection
import redis.exceptions

from lookonce.store.redis.exchange import Exchange, reason_of_text
from lookonce.store.redis.miss_reason import CacheMissError, MissReason, RedisReplyError, RedisTroubleError
from lookonce.store.redis.url import Address, unusable_url

_MAX_CONNECT_S = 0.2
# Keeps redis-py from sending CLIENT SETINFO: two round trips and, under tight ACLs, two log lines on the server.
_SILENT: dict[str, Any] = (
    {"driver_info": None} if hasattr(redis, "DriverInfo") else {"lib_name": None, "lib_version": None}
)
_REASON_OF_EXCEPTION: tuple[tuple[type[Exception], MissReason], ...] = (
    (redis.exceptions.AuthenticationError, MissReason.AUTH),
    (redis.exceptions.NoPermissionError, MissReason.NOPERM),
    (redis.exceptions.BusyLoadingError, MissReason.LOADING),
    (redis.exceptions.TimeoutError, MissReason.TIMEOUT),
    (TimeoutError, MissReason.TIMEOUT),
)


class RedisNode:
    """One server and its connections. Thread-safe; concurrent exchanges use different connections.

    A new connection has half of `budget_s` for each step of connecting and logging in. Name resolution is bounded by
    the system's resolver only. Raises ConfigurationError for an unusable URL.
    """

    def __init__(self, url: str, address: Address | None, budget_s: float) -> None:
        """Connects to nothing yet. `address` takes precedence over the host and port in `url`."""
        self.url = url
        self.address = address
        self._pool = _make_pool(url, address, budget_s)
        # Connections between two uses, the latest last. Taking one from here costs 3 µs. redis-py's pool takes 50 µs, a
        # twelfth of the time that 2 MB take.
        self._idle: deque[Any] = deque()
        self._pid = os.getpid()
        self._is_retired = False

    @contextlib.contextmanager
    def exchange(self, deadline_s: float) -> Iterator[Exchange]:
        """Yields an exchange for a few commands, until `deadline_s` on the monotonic clock. Raises RedisTroubleError.

        The connection is used again only if the block read all its replies and ended without an exception, or with a
        CacheMissError of reason ABSENT.
        """
        connection = self._take()
        is_in_step = False
        try:
            exchange = Exchange(_socket_of(connection), deadline_s)
            try:
                yield exchange
            except CacheMissError as miss:
                is_in_step = miss.reason is MissReason.ABSENT and exchange.is_idle
                raise
            is_in_step = exchange.is_idle
        finally:
            if is_in_step:
                self._idle.append(connection)
            else:
                self._drop(connection)
            if self._is_retired:
                self._drop_idle()

    def retire(self) -> None:
        """Closes idle connections now and busy ones when their block ends."""
        self._is_retired = True
        self._drop_idle()

    def _take(self) -> Any:
        """Returns an idle connection that the server has neither closed nor written to, or else a new one."""
        if self._pid != os.getpid():
            # This is a forked child, and the idle connections are its parent's.
            self._idle, self._pid = deque(), os.getpid()
        while (connection := _popped(self._idle)) is not None:
            if _is_silent(connection):
                return connection
            self._drop(connection)
        try:
            return self._pool.get_connection()
        except (redis.exceptions.RedisError, OSError) as error:
            raise RedisTroubleError(_reason_of_exception(error)) from error

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)

    def _drop_idle(self) -> None:
        while (connection := _popped(self._idle)) is not None:
            self._drop(connection)


def _connection_options(step_timeout_s: float) -> dict[str, Any]:
    """Returns redis-py's options for every connection: each step has `step_timeout_s` seconds, and none is retried."""
    return {
        "socket_connect_timeout": min(_MAX_CONNECT_S, step_timeout_s),
        "socket_timeout": step_timeout_s,
        "retry": None,
        "health_check_interval": 0,
        "decode_responses": False,
        # RESP2 needs no greeting: a new connection without a password costs no round trip.
        "protocol": 2,
        "redis_connect_func": functools.partial(_log_in, timeout_s=step_timeout_s),
        **_SILENT,
    }


def _reason_of_exception(error: Exception) -> MissReason:
    """Returns the metric label of an exception that redis-py raised, one of a fixed few."""
    for exception_class, reason in _REASON_OF_EXCEPTION:
        if isinstance(error, exception_class):
            return reason
    if isinstance(error, redis.exceptions.ResponseError):
        return reason_of_text(f"{getattr(error, 'status_code', None) or ''} {error}".strip())
    if "max number of clients" in str(error):
        return MissReason.MAX_CLIENTS
    return MissReason.CONNECT_FAILED


def _log_in(connection: Any, timeout_s: float) -> None:
    """Authenticates a new connection, names it and selects its database, all within `timeout_s` seconds.

    redis-py calls this in place of its own log-in. That one may raise anything for a malformed reply, and its timeout
    starts anew with every packet. Raises RedisTroubleError; the connection is closed then.
    """
    # The pool asks the parser whether bytes have arrived, so the parser must know the socket.
    connection._parser.on_connect(connection)
    try:
        sock = _socket_of(connection)
        exchange = Exchange(sock, time.monotonic() + timeout_s)
        if connection.username or connection.password:
            user = (connection.username.encode(),) if connection.username else ()
            _expect_ok(exchange, MissReason.AUTH, b"AUTH", *user, (connection.password or "").encode())
        if connection.client_name:
            _expect_ok(exchange, MissReason.SERVER_ERROR, b"CLIENT", b"SETNAME", connection.client_name.encode())
        if connection.db:
            _expect_ok(exchange, MissReason.SERVER_ERROR, b"SELECT", int(connection.db))
        if not exchange.is_idle:
            raise RedisTroubleError(MissReason.PROTOCOL)
    except BaseException:
        connection.disconnect()
        raise
    sock.settimeout(timeout_s)


def _expect_ok(exchange: Exchange, refused: MissReason, *command: bytes | int) -> None:
    """Sends one command and reads the reply OK. Raises RedisTroubleError for any other.

    `refused` is the miss reason for an error reply whose text is unknown.
    """
    exchange.send(*command)
    try:
        if not exchange.read_status():
            raise RedisTroubleError(MissReason.PROTOCOL)
    except RedisReplyError as refusal:
        reason = refused if refusal.reason is MissReason.SERVER_ERROR else refusal.reason
        raise RedisReplyError(reason) from refusal


def _popped(idle: deque[Any]) -> Any | None:
    """Removes and returns the latest connection; None when there is none left."""
    try:
        return idle.pop()
    except IndexError:
        return None


def _is_silent(connection: Any) -> bool:
    """Returns whether nothing has arrived since the last reply. The end of a connection counts as an arrival."""
    sock = connection._sock
    if sock is None or (isinstance(sock, ssl.SSLSocket) and sock.pending()):
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)


def _socket_of(connection: Any) -> socket.socket:
    """Returns the socket of a connection. Raises RedisTroubleError when it is closed."""
    sock: socket.socket | None = connection._sock
    if sock is None:
        raise RedisTroubleError(MissReason.CLOSED)
    return sock


def _make_pool(url: str, address: Address | None, budget_s: float) -> Any:
    ours: dict[str, Any] = {
        # Half of the budget for each step, so that a dead or frozen server costs no more than the budget.
        **_connection_options(budget_s / 2),
        "retry_on_timeout": False,
        "retry_on_error": [],
        # Never reached: the number of threads is the limit.
        "max_connections": 1 << 20,
    }
    if address is not None:
        ours.update(host=address.host, port=address.port)
    try:
        options = {**redis.connection.parse_url(url), **ours}
        if url.startswith("unix:") and not options.get("path"):
            raise ValueError("no path")
        str(options.get("host", "")).encode("idna")
        pool = redis.ConnectionPool(**options)
        # Raises for an unknown option in the URL, which would otherwise fail at the first use.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        raise unusable_url(error) from None
    return pool
