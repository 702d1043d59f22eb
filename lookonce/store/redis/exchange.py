"""One exchange of commands and replies with Redis on one socket, under one deadline.

This module reads and writes the socket itself, for two reasons. Rows are sent from and received into the caller's
memory without a copy. And one deadline holds for the whole exchange, while redis-py's timeout starts anew with every
packet. Every failure is a RedisTroubleError with a bounded reason.

On a plain socket the Linux kernel enforces the deadline (SO_RCVTIMEO, SO_SNDTIMEO) and fills a whole buffer in one call
(MSG_WAITALL). Python's own timeouts take three calls for every packet. They remain for TLS sockets, which support
neither option, and for other systems, where the kernel's timeout may start anew with every packet.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import sys
import time
from collections.abc import Iterator
from typing import TypeAlias

from lookonce.store.redis.miss_reason import MissReason, RedisReplyError, RedisTroubleError

Argument: TypeAlias = bytes | int | tuple[bytes | memoryview, ...]
"""One argument of a command. A tuple is one argument whose bytes lie in several buffers."""

Nested: TypeAlias = "int | bytes | list[Nested] | None"
"""A reply of any shape. None stands for nil."""

_MAX_LINE_BYTES = 16 << 10
_RECEIVE_BYTES = 4 << 10
_SEND_BYTES = 1 << 20
# Arguments up to this size are copied, so that they share a packet with their neighbours.
_INLINE_BYTES = 8 << 10
_MAX_SMALL_BULK_BYTES = 64 << 10
_MAX_TRANSACTION = 16
_MAX_FIELDS = 1024
_MAX_ARRAY_DEPTH = 4
_ANY_TYPE = (b"$", b":", b"+", b"*")
# The kernel's timeout is set again once less than this share of it remains. A deadline may be overrun by the rest.
_RENEWED_SHARE = 0.9
_TIMEVAL = struct.Struct("@ll")
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


class RedisMovedError(RedisReplyError):
    """Raised for MOVED: another node of the cluster owns the slot now, and the node that replied knows which."""


class Exchange:
    """Commands and their replies on one socket until one deadline. Replies come in the order of the commands."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self.socket = sock
        self._deadline_s = deadline_s
        self._is_kept_by_kernel = sys.platform == "linux" and not isinstance(sock, ssl.SSLSocket)
        if self._is_kept_by_kernel:
            sock.settimeout(None)
        # The timeouts that were set in the kernel last, seconds, by socket option.
        self._kernel_limits_s: dict[int, float] = {}
        # Received bytes that no reply has consumed yet.
        self._buffer = bytearray()
        self._num_outstanding = 0
        self._was_answered = False
        # Bytes of strings received so far, incomplete ones included.
        self.num_bulk_bytes = 0

    @property
    def is_local(self) -> bool:
        """Whether this is a Unix socket."""
        return self.socket.family == socket.AF_UNIX

    @property
    def is_idle(self) -> bool:
        """Whether every command has been answered and no received byte is left over."""
        return self._num_outstanding == 0 and not self._buffer

    def send(self, *arguments: Argument) -> None:
        """Sends one command. Large buffers are sent from where they are, without a copy."""
        self.send_together(arguments)

    def send_together(self, *commands: tuple[Argument, ...]) -> None:
        """Sends commands one after the other, by one call of the system unless they have large buffers."""
        self._num_outstanding += len(commands)
        pending = b""
        for arguments in commands:
            pending += b"*%d\r\n" % len(arguments)
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
        """Returns an integer reply, as EXISTS, STRLEN, UNLINK and PEXPIRE give."""
        return self._number(self._reply(b":"))

    def read_status(self) -> bool:
        """Returns True for a status such as OK, and False for nil, which SET gives when its condition did not hold."""
        line = self._reply(b"+", b"$")
        if line[:1] == b"$" and self._number(line) != -1:
            raise RedisTroubleError(MissReason.PROTOCOL)
        return line[:1] == b"+"

    def read_transaction(self) -> list[int] | None:
        """Returns the reply to EXEC if all commands reply with integers; None when a watched key had changed."""
        length = self._number(self._reply(b"*"))
        if length == -1:
            return None
        if not 0 <= length <= _MAX_TRANSACTION:
            raise RedisTroubleError(MissReason.PROTOCOL)
        return [self._number(self._typed_line(b":")) for _ in range(length)]

    def read_fields(self) -> dict[bytes, bytes]:
        """Returns the reply to HELLO, without the fields whose name or value is no string."""
        values = self.read_nested(_MAX_FIELDS)
        if not isinstance(values, list):
            raise RedisTroubleError(MissReason.PROTOCOL)
        pairs = zip(values[::2], values[1::2], strict=False)
        return {name: value for name, value in pairs if isinstance(name, bytes) and isinstance(value, bytes)}

    def read_nested(self, max_values: int) -> Nested:
        """Returns a reply of any shape with at most `max_values` values, counting those inside arrays."""
        return self._nested(self._reply(*_ANY_TYPE), iter(range(max_values)), depth=0)

    def read_bulk(self) -> bytes | None:
        """Returns a string of at most 64 KiB, or None for nil."""
        length = self.begin_bulk()
        return None if length is None else self._small_bulk(length)

    def read_bulk_into(self, view: memoryview) -> int:
        """Receives a string into the start of `view` and returns its length; 0 for nil.

        A string longer than `view` is a protocol error, since GETRANGE never returns more than was requested.
        """
        length = self.begin_bulk()
        if length is None:
            return 0
        if length > view.nbytes:
            raise RedisTroubleError(MissReason.PROTOCOL)
        self.receive_bulk(view[:length])
        self.end_bulk()
        return length

    def begin_bulk(self) -> int | None:
        """Returns the length of a string, or None for nil. Read its bytes by `receive_bulk`, then call `end_bulk`."""
        return self._length(self._reply(b"$"))

    def receive_bulk(self, view: memoryview) -> None:
        """Fills `view` with the next bytes of the string."""
        num_bytes = min(len(self._buffer), view.nbytes)
        view[:num_bytes] = self._buffer[:num_bytes]
        del self._buffer[:num_bytes]
        self.num_bulk_bytes += num_bytes
        while num_bytes < view.nbytes:
            num_received = self._receive_into(view[num_bytes:])
            self.num_bulk_bytes += num_received
            num_bytes += num_received

    def end_bulk(self) -> None:
        """Reads the end of a string whose bytes have all been received."""
        while len(self._buffer) < 2:
            self._fill()
        if self._buffer[:2] != b"\r\n":
            raise RedisTroubleError(MissReason.PROTOCOL)
        del self._buffer[:2]

    def _small_bulk(self, length: int) -> bytes:
        if length > _MAX_SMALL_BULK_BYTES:
            raise RedisTroubleError(MissReason.PROTOCOL)
        data = bytearray(length)
        self.receive_bulk(memoryview(data))
        self.end_bulk()
        return bytes(data)

    def _nested(self, line: bytes, places: Iterator[int], depth: int) -> Nested:
        """Returns the value that `line` begins. It and each value inside it consume one of `places`."""
        if next(places, None) is None or depth > _MAX_ARRAY_DEPTH:
            raise RedisTroubleError(MissReason.PROTOCOL)
        if line[:1] == b"+":
            return line[1:]
        if line[:1] == b":":
            return self._number(line)
        length = self._length(line)
        if length is None:
            return None
        if line[:1] == b"$":
            return self._small_bulk(length)
        return [self._nested(self._typed_line(*_ANY_TYPE), places, depth + 1) for _ in range(length)]

    def _reply(self, *types: bytes) -> bytes:
        """Returns the first line of the next reply. Raises RedisReplyError for an error."""
        line = self._line()
        self._num_outstanding -= 1
        if line[:1] == b"-":
            raise _error_of_text(line[1:].decode("utf-8", "replace"))
        return _checked_type(line, types)

    def _typed_line(self, *types: bytes) -> bytes:
        return _checked_type(self._line(), types)

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise RedisTroubleError(MissReason.PROTOCOL)
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _length(self, line: bytes) -> int | None:
        length = self._number(line)
        if length < -1:
            raise RedisTroubleError(MissReason.PROTOCOL)
        return None if length == -1 else length

    @staticmethod
    def _number(line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError as error:
            raise RedisTroubleError(MissReason.PROTOCOL) from error

    # Socket calls, each within the rest of the deadline.

    def _fill(self) -> None:
        """Receives at least one more byte into the buffer."""
        try:
            self._limit(socket.SO_RCVTIMEO)
            received = self.socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise self._trouble(error) from error
        self._buffer += received
        self._note_received(len(received))

    def _receive_into(self, view: memoryview) -> int:
        """Receives into `view` and returns the number of bytes; fewer than its size at the deadline or under TLS."""
        try:
            self._limit(socket.SO_RCVTIMEO)
            num_bytes = self.socket.recv_into(view, 0, socket.MSG_WAITALL if self._is_kept_by_kernel else 0)
        except OSError as error:
            raise self._trouble(error) from error
        self._note_received(num_bytes)
        return num_bytes

    def _send_all(self, view: memoryview) -> None:
        try:
            while view:
                self._limit(socket.SO_SNDTIMEO)
                view = view[self.socket.send(view[:_SEND_BYTES]) :]
        except OSError as error:
            raise self._trouble(error) from error

    def _limit(self, option: int) -> None:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        if self._is_kept_by_kernel:
            if remaining_s >= _RENEWED_SHARE * self._kernel_limits_s.get(option, math.inf):
                return
            self._kernel_limits_s[option] = remaining_s
            # A timeout of zero would mean that there is none.
            remaining_us = max(1, int(remaining_s * 1_000_000))
            self.socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(remaining_us, 1_000_000)))
        else:
            self.socket.settimeout(remaining_s)

    def _note_received(self, num_bytes: int) -> None:
        if not num_bytes:
            raise RedisTroubleError(MissReason.CLOSED)
        self._was_answered = True

    def _trouble(self, error: OSError) -> RedisTroubleError:
        if isinstance(error, TimeoutError | BlockingIOError):
            # A server that answers slowly is alive. It must not open the breaker, since smaller entries may succeed.
            return RedisTroubleError(MissReason.SLOW if self._was_answered else MissReason.TIMEOUT)
        return RedisTroubleError(MissReason.CLOSED)


def reason_of_text(text: str) -> MissReason:
    """Returns the metric label of an error reply, one of a fixed few.

    The text itself may hold keys and addresses, and is dropped.
    """
    if "max number of clients" in text:
        return MissReason.MAX_CLIENTS
    return _REASON_OF_CODE.get(text.partition(" ")[0], MissReason.SERVER_ERROR)


def _error_of_text(text: str) -> RedisReplyError:
    reason = reason_of_text(text)
    return RedisMovedError(reason) if text.startswith("MOVED ") else RedisReplyError(reason)


def _checked_type(line: bytes, types: tuple[bytes, ...]) -> bytes:
    if line[:1] not in types:
        raise RedisTroubleError(MissReason.PROTOCOL)
    return line


def _encode(argument: bytes | int) -> bytes:
    return argument if isinstance(argument, bytes) else b"%d" % argument
