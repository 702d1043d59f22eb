"""One exchange of commands and replies with Redis under one deadline, on a connection of redis-py's pool.

redis-py does what differs between servers (URL, TLS, authentication, pooling); the bytes go through the socket here, so
that rows are sent from and received into the caller's memory without a copy, and so that a deadline holds for the
whole exchange: redis-py's own timeout starts anew with every packet. Whatever goes wrong is a CacheMissError with a
bounded reason, and a connection on which anything unexpected happened is closed, never put back in step.
"""

from __future__ import annotations

import contextlib
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import redis
import redis.connection
import redis.exceptions

from lookonce.errors import ConfigurationError
from lookonce.miss_reason import MissReason, RedisReplyError, RedisTroubleError

Argument: TypeAlias = bytes | int | tuple[bytes | memoryview, ...]
"""One argument of a command; a tuple is one argument whose bytes lie in several places."""

ReplyT = TypeVar("ReplyT")
ArgumentT = TypeVar("ArgumentT")

_MAX_CONNECT_S = 0.2
_MAX_LINE_BYTES = 16 << 10
_RECEIVE_BYTES = 4 << 10
_SEND_BYTES = 1 << 20
# Longest argument that is copied to travel with its neighbours in one packet.
_INLINE_BYTES = 8 << 10
_MAX_SMALL_BULK_BYTES = 64 << 10
_MAX_TRANSACTION = 16
# The CLIENT SETINFO of a new connection would be two round trips and, with tight ACLs, two log lines on the server.
_SILENT: dict[str, Any] = (
    {"driver_info": None} if hasattr(redis, "DriverInfo") else {"lib_name": None, "lib_version": None}
)
_REASON_OF_CODE = {
    "OOM": MissReason.OOM,
    "READONLY": MissReason.READONLY,
    "NOREPLICAS": MissReason.READONLY,
    "NOPERM": MissReason.NOPERM,
    "NOAUTH": MissReason.AUTH,
    "WRONGPASS": MissReason.AUTH,
    "LOADING": MissReason.LOADING,
    "MISCONF": MissReason.MISCONF,
    "WRONGTYPE": MissReason.WRONG_TYPE,
    "MOVED": MissReason.MOVED,
    "ASK": MissReason.MOVED,
    "TRYAGAIN": MissReason.MOVED,
    "CLUSTERDOWN": MissReason.CLUSTER_DOWN,
    "MASTERDOWN": MissReason.CLUSTER_DOWN,
}


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


class Exchange:
    """Commands and replies on one socket until one deadline. Replies come in the order of the commands."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self.socket = sock
        self._deadline_s = deadline_s
        # Bytes that arrived behind the line that was asked for.
        self._buffer = bytearray()
        self._num_outstanding = 0
        self._was_answered = False
        # Of strings that were received to their end.
        self.num_bulk_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether every command has been answered and no byte is left over."""
        return self._num_outstanding == 0 and not self._buffer

    def send(self, *arguments: Argument) -> None:
        """Sends one command. Large buffers go out as they lie in memory."""
        self._num_outstanding += 1
        pending = b"*%d\r\n" % len(arguments)
        for argument in arguments:
            parts = argument if isinstance(argument, tuple) else (_encode(argument),)
            pending += b"$%d\r\n" % sum(map(len, parts))
            for part in parts:
                if len(part) <= _INLINE_BYTES:
                    pending += part
                else:
                    self._send_all(memoryview(pending))
                    self._send_all(memoryview(part))
                    pending = b""
            pending += b"\r\n"
        self._send_all(memoryview(pending))

    def read_integer(self) -> int:
        """The reply to EXISTS, STRLEN, UNLINK, PEXPIRE."""
        return self._number(self._typed_line(b":"))

    def read_status(self) -> bool:
        """The reply to PING and SET: True for a status, False for nil, i.e. a condition like NX did not hold."""
        line = self._typed_line(b"+", b"$")
        if line[:1] == b"$" and self._number(line) != -1:
            raise RedisTroubleError(MissReason.PROTOCOL)
        return line[:1] == b"+"

    def read_transaction(self) -> list[int] | None:
        """The reply to EXEC whose commands all answer with integers; None when a watched key had changed."""
        length = self._number(self._typed_line(b"*"))
        if length == -1:
            return None
        if not 0 <= length <= _MAX_TRANSACTION:
            raise RedisTroubleError(MissReason.PROTOCOL)
        lines = [self._line() for _ in range(length)]
        if any(line[:1] != b":" for line in lines):
            raise RedisTroubleError(MissReason.PROTOCOL)
        return [self._number(line) for line in lines]

    def read_bulk(self) -> bytes | None:
        """A string of at most 64 KiB; None for nil."""
        length = self._bulk_length()
        if length is None:
            return None
        if length > _MAX_SMALL_BULK_BYTES:
            raise RedisTroubleError(MissReason.PROTOCOL)
        data = bytearray(length)
        self._finish_bulk(memoryview(data))
        return bytes(data)

    def read_bulk_into(self, view: memoryview) -> int:
        """Receives a string straight into the first bytes of `view` and says how many there were; nil is none.

        A string longer than `view` is a protocol error: a server never sends more than GETRANGE asked for.
        """
        length = self._bulk_length()
        if length is None:
            return 0
        if length > view.nbytes:
            raise RedisTroubleError(MissReason.PROTOCOL)
        self._finish_bulk(view[:length])
        return length

    def _typed_line(self, *types: bytes) -> bytes:
        line = self._line()
        self._num_outstanding -= 1
        if line[:1] == b"-":
            raise RedisReplyError(_reason_of_text(line[1:].decode("utf-8", "replace")))
        if line[:1] not in types:
            raise RedisTroubleError(MissReason.PROTOCOL)
        return line

    def _bulk_length(self) -> int | None:
        length = self._number(self._typed_line(b"$"))
        if length < -1:
            raise RedisTroubleError(MissReason.PROTOCOL)
        return None if length == -1 else length

    def _finish_bulk(self, view: memoryview) -> None:
        buffered = min(len(self._buffer), view.nbytes)
        view[:buffered] = self._buffer[:buffered]
        del self._buffer[:buffered]
        while buffered < view.nbytes:
            buffered += self._receive(self.socket.recv_into, view[buffered:])
        while len(self._buffer) < 2:
            self._fill()
        if self._buffer[:2] != b"\r\n":
            raise RedisTroubleError(MissReason.PROTOCOL)
        del self._buffer[:2]
        self.num_bulk_bytes += view.nbytes

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise RedisTroubleError(MissReason.PROTOCOL)
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _fill(self) -> None:
        self._buffer += self._receive(self.socket.recv, _RECEIVE_BYTES)

    def _receive(self, receive: Callable[[ArgumentT], ReplyT], argument: ArgumentT) -> ReplyT:
        received = self._in_time(receive, argument)
        if not received:
            raise RedisTroubleError(MissReason.CLOSED)
        self._was_answered = True
        return received

    def _send_all(self, view: memoryview) -> None:
        while view:
            view = view[self._in_time(self.socket.send, view[:_SEND_BYTES]) :]

    def _in_time(self, call: Callable[[ArgumentT], ReplyT], argument: ArgumentT) -> ReplyT:
        """One socket call within what is left of the deadline."""
        remaining_s = self._deadline_s - time.monotonic()
        try:
            if remaining_s <= 0:
                raise TimeoutError
            self.socket.settimeout(remaining_s)
            return call(argument)
        except TimeoutError as error:
            # A server that answers too slowly lives: it must not open the breaker for smaller entries.
            raise RedisTroubleError(MissReason.SLOW if self._was_answered else MissReason.TIMEOUT) from error
        except OSError as error:
            raise RedisTroubleError(MissReason.CLOSED) from error

    def _number(self, line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError as error:
            raise RedisTroubleError(MissReason.PROTOCOL) from error


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


def _encode(argument: bytes | int) -> bytes:
    return argument if isinstance(argument, bytes) else b"%d" % argument


def _parse_max_memory(info: bytes) -> int | None:
    for line in info.splitlines():
        name, _, value = line.partition(b":")
        if name == b"maxmemory" and value.isdigit():
            return int(value) or None
    return None


def _reason_of_text(text: str) -> MissReason:
    """The bounded label of an error reply; its text goes nowhere, since it may hold keys and addresses."""
    if "max number of clients" in text:
        return MissReason.MAX_CLIENTS
    return _REASON_OF_CODE.get(text.partition(" ")[0], MissReason.SERVER_ERROR)


def _reason_of_exception(error: Exception) -> MissReason:
    """The label of a failure to get a connection."""
    if isinstance(error, redis.exceptions.AuthenticationError):
        return MissReason.AUTH
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return MissReason.LOADING
    if isinstance(error, redis.exceptions.TimeoutError | TimeoutError):
        return MissReason.TIMEOUT
    if isinstance(error, redis.exceptions.ResponseError):
        return _reason_of_text(f"{getattr(error, 'status_code', None) or ''} {error}".strip())
    if "max number of clients" in str(error):
        return MissReason.MAX_CLIENTS
    return MissReason.CONNECT_FAILED
