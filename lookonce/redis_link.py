"""Connections to Redis, from redis-py's pool, lent for one exchange each.

redis-py does what differs between servers: URL, TLS, authentication, pooling; commands and replies go through
`redis_exchange.py`. Whatever goes wrong is a CacheMissError with a bounded reason, and a connection on which anything
unexpected happened is closed, never put back in step.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import redis
import redis.connection
import redis.exceptions

from lookonce.errors import ConfigurationError
from lookonce.miss_reason import MissReason, RedisReplyError, RedisTroubleError
from lookonce.redis_exchange import Exchange, reason_of_text

_MAX_CONNECT_S = 0.2
# The CLIENT SETINFO of a new connection would be two round trips and, with tight ACLs, two log lines on the server.
_SILENT: dict[str, Any] = (
    {"driver_info": None} if hasattr(redis, "DriverInfo") else {"lib_name": None, "lib_version": None}
)


class RedisLink:
    """Connections to one Redis URL. Thread-safe; every thread that asks at the same time has its own connection.

    The deadline holds for the exchange; a new connection has half of `budget_s` for each step of connecting and logging
    in, and name resolution takes what the system's resolver takes. Raises ConfigurationError for an unusable URL.
    """

    def __init__(self, url: str, budget_s: float) -> None:
        self._pool = _make_pool(url, budget_s)
        self._is_closed = False
        # By socket, so that a reconnect (restart, failover) asks again.
        self._max_memory: weakref.WeakKeyDictionary[socket.socket, int | None] = weakref.WeakKeyDictionary()
        self._by_reference: weakref.WeakKeyDictionary[socket.socket, bool] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def exchange(self, deadline_s: float) -> Iterator[Exchange]:
        """A connection for a few commands, until `deadline_s` on the monotonic clock. Raises RedisTroubleError.

        The connection goes back to the pool only when the block ended without an exception and read all its replies.
        """
        connection = self._connect()
        is_in_step = False
        try:
            exchange = Exchange(_socket_of(connection), deadline_s)
            yield exchange
            is_in_step = exchange.is_idle
        finally:
            if not is_in_step or self._is_closed:
                connection.disconnect()
            self._pool.release(connection)

    def max_memory_bytes(self, exchange: Exchange) -> int | None:
        """The server's `maxmemory`, asked once per connection. None: no limit, or the role may not know."""
        if exchange.socket not in self._max_memory:
            try:
                exchange.send(b"INFO", b"memory")
                self._max_memory[exchange.socket] = _parse_max_memory(exchange.read_bulk() or b"")
            except RedisReplyError:
                self._max_memory[exchange.socket] = None
        return self._max_memory[exchange.socket]

    def replies_by_reference(self, exchange: Exchange) -> bool:
        """Whether a GET costs the server no copy of the value (Valkey since 9), asked once per connection."""
        if exchange.socket not in self._by_reference:
            try:
                exchange.send(b"HELLO")
                self._by_reference[exchange.socket] = _is_valkey_since_9(exchange.read_fields())
            except RedisReplyError:
                self._by_reference[exchange.socket] = False
        return self._by_reference[exchange.socket]

    def close(self) -> None:
        """Closes idle connections now and busy ones when their exchange ends."""
        self._is_closed = True
        self._pool.disconnect(inuse_connections=False)

    def _connect(self) -> Any:
        if self._is_closed:
            raise RedisTroubleError(MissReason.STORE_CLOSED)
        try:
            return self._pool.get_connection()
        except (redis.exceptions.RedisError, OSError) as error:
            raise RedisTroubleError(_reason_of_exception(error)) from error


def _make_pool(url: str, budget_s: float) -> Any:
    ours: dict[str, Any] = {
        # Half of the budget for each step, so that a dead or frozen server costs no more than the budget.
        "socket_connect_timeout": min(_MAX_CONNECT_S, budget_s / 2),
        "socket_timeout": budget_s / 2,
        "retry": None,
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "decode_responses": False,
        # RESP2 needs no greeting: a new connection without a password costs no round trip.
        "protocol": 2,
        # The number of threads is the limit.
        "max_connections": 1 << 20,
        **_SILENT,
    }
    try:
        options = {**redis.connection.parse_url(url), **ours}
        if url.startswith("unix:") and not options.get("path"):
            raise ValueError("no path")
        str(options.get("host", "")).encode("idna")
        pool = redis.ConnectionPool(**options)
        # An unknown option in the URL would otherwise come up at the first use.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        raise ConfigurationError(
            "redis_url: cannot be used; expected redis://, rediss:// or unix:// with options that redis-py knows "
            f"({type(error).__name__})"
        ) from None
    return pool


def _socket_of(connection: Any) -> socket.socket:
    sock: socket.socket | None = connection._sock
    if sock is None:
        raise RedisTroubleError(MissReason.CLOSED)
    return sock


def _parse_max_memory(info: bytes) -> int | None:
    for line in info.splitlines():
        name, _, value = line.partition(b":")
        if name == b"maxmemory" and value.isdigit():
            return int(value) or None
    return None


def _reason_of_exception(error: Exception) -> MissReason:
    """The label of a failure to get a connection."""
    if isinstance(error, redis.exceptions.AuthenticationError):
        return MissReason.AUTH
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return MissReason.LOADING
    if isinstance(error, redis.exceptions.TimeoutError | TimeoutError):
        return MissReason.TIMEOUT
    if isinstance(error, redis.exceptions.ResponseError):
        return reason_of_text(f"{getattr(error, 'status_code', None) or ''} {error}".strip())
    if "max number of clients" in str(error):
        return MissReason.MAX_CLIENTS
    return MissReason.CONNECT_FAILED


def _is_valkey_since_9(fields: dict[bytes, bytes]) -> bool:
    major = fields.get(b"version", b"").partition(b".")[0]
    return fields.get(b"server") == b"valkey" and major.isdigit() and int(major) >= 9
