"""Calls as HTTP/2 frames (RFC 9113), for clients that no library would be. As a program, one that resets its calls.

The program opens as many calls as it is told, resets them all, and does so again and again. It ends when the server has
read all of that.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Mapping

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING = 0, 1, 3, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_CANCEL = 8
_INITIAL_WINDOW_SIZE = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_TIMEOUT_S = 60.0


def connect(target: str, *, window_bytes: int | None = None) -> socket.socket:
    """Returns a connection that accepts what the server asks for, and may receive 64 KiB of all answers.

    The server may send `window_bytes` of each answer. With 0 it can send headers only.
    """
    host, _, port = target.rpartition(":")
    connection = socket.create_connection((host, int(port)), _TIMEOUT_S)
    settings = b"" if window_bytes is None else struct.pack(">HI", _INITIAL_WINDOW_SIZE, window_bytes)
    connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
    # The first frame is the server's settings. It lets only some calls pass until they are acknowledged.
    head = connection.recv(9, socket.MSG_WAITALL)
    connection.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL)
    connection.sendall(_frame(_SETTINGS, _ACK, 0))
    return connection


def call(
    stream: int,
    method: str,
    message: bytes = b"",
    *,
    num_sent: int | None = None,
    metadata: Mapping[str, bytes] | None = None,
) -> bytes:
    """Returns the frames of a call of `method` ("/package.Service/Method") with one request message of up to 16 KB.

    With `num_sent`, the call does not end and only so many bytes of the message's frame are sent.
    """
    headers: dict[str, str | bytes] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "test",
        "content-type": "application/grpc",
        "te": "trailers",
        **(metadata or {}),
    }
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    data = struct.pack(">BI", 0, len(message)) + message
    opened = _frame(_HEADERS, _END_HEADERS, stream, block)
    if num_sent is not None:
        return opened + _frame(_DATA, 0, stream, data[:num_sent])
    return opened + _frame(_DATA, _END_STREAM, stream, data)


def reset(stream: int) -> bytes:
    """Returns the frame with which a client cancels a call."""
    return _frame(_RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(value: str | bytes) -> bytes:
    """Returns a string as HPACK writes it without compression (RFC 7541, section 5.2), of up to 126 bytes."""
    raw = value.encode() if isinstance(value, str) else value
    assert len(raw) < 127
    return bytes([len(raw)]) + raw


def wait_until_read(connection: socket.socket) -> None:
    """Waits until the server has read all that was sent to it. Raises ConnectionError if it has closed instead."""
    connection.sendall(_frame(_PING, 0, 0, bytes(8)))
    _wait_for(connection, _PING, _ACK)


def wait_until_answered(connection: socket.socket) -> None:
    """Waits for the headers of an answer. Raises ConnectionError if the server has closed instead."""
    _wait_for(connection, _HEADERS, _END_HEADERS)


def answer_pings(connection: socket.socket) -> bytes:
    """Acknowledges each PING until the server closes the connection, as it does to ask whether a client is there.

    Returns the headers and trailers of all answers. gRPC sends texts in them without compression.
    """
    headers = b""
    with connection.makefile("rb") as received:
        while head := received.read(9):
            payload = received.read(int.from_bytes(head[:3], "big"))
            if (head[3], head[4]) == (_PING, 0):
                connection.sendall(_frame(_PING, _ACK, 0, payload))
            if head[3] == _HEADERS:
                headers += payload
    return headers


def _wait_for(connection: socket.socket, kind: int, flags: int) -> None:
    with connection.makefile("rb") as received:
        while head := received.read(9):
            received.read(int.from_bytes(head[:3], "big"))
            if (head[3], head[4]) == (kind, flags):
                return
    raise ConnectionError("the server has closed the connection")


def main() -> None:
    target, method, num_times, num_calls = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with connect(target) as connection:
        first = 1
        for _ in range(num_times):
            streams = range(first, first + 2 * num_calls, 2)
            connection.sendall(b"".join(call(stream, method) for stream in streams))
            connection.sendall(b"".join(reset(stream) for stream in streams))
            first = streams.stop
        wait_until_read(connection)


if __name__ == "__main__":
    main()
