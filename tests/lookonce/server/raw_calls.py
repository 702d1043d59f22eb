"""Calls as HTTP/2 frames (RFC 9113), for clients that no library would be. As a program, one that resets its calls.

The program opens as many calls as it is told, resets them all, and does so again and again. It ends when the server has
read all of that.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Mapping

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_CANCEL = 8
_ALL_CALLS = (1 << 31) - 1
_INITIAL_WINDOW_SIZE = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_TIMEOUT_S = 60.0


def connect(target: str, *, window_bytes: int | None = None, kernel_bytes: int | None = None) -> socket.socket:
    """Returns a connection that accepts what the server asks for, and may receive 64 KiB of all answers.

    The server may send `window_bytes` of each answer. With 0 it can send headers only. The kernel keeps about
    `kernel_bytes` of what the server sends before the client reads it.
    """
    host, _, port = target.rpartition(":")
    connection = socket.socket()
    connection.settimeout(_TIMEOUT_S)
    if kernel_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_bytes)
    connection.connect((host, int(port)))
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


def window_update(num_bytes: int) -> bytes:
    """Returns the frame that lets the server send so many bytes more on the connection."""
    return _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", num_bytes))


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


def wait_until_told_to_go(connection: socket.socket) -> None:
    """Acknowledges each PING until the server has said which calls it still answers. Reads nothing behind that."""
    while head := connection.recv(9, socket.MSG_WAITALL):
        payload = connection.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL)
        if (head[3], head[4]) == (_PING, 0):
            connection.sendall(_frame(_PING, _ACK, 0, payload))
        # The first of two such frames allows all calls, so that those on their way are not lost.
        if head[3] == _GOAWAY and int.from_bytes(payload[:4], "big") < _ALL_CALLS:
            return
    raise ConnectionError("the server has closed the connection")


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


def read_answers(connection: socket.socket, *, pause_s: float = 0.0) -> tuple[bytes, int]:
    """Reads until the server closes the connection. Returns all headers and trailers, and the number of data bytes.

    With `pause_s`, it reads 16 KiB at a time.
    """
    received = bytearray()
    while chunk := connection.recv(16_384):
        received += chunk
        time.sleep(pause_s)
    headers, num_bytes, at = b"", 0, 0
    while at < len(received):
        num_payload, kind = int.from_bytes(received[at : at + 3], "big"), received[at + 3]
        headers += received[at + 9 : at + 9 + num_payload] if kind == _HEADERS else b""
        num_bytes += num_payload if kind == _DATA else 0
        at += 9 + num_payload
    return headers, num_bytes


def _wait_for(connection: socket.socket, kind: int, flags: int) -> None:
    with connection.makefile("rb") as received:
        while head := received.read(9):
            received.read(int.from_bytes(head[:3], "big"))
            if head[3] == kind and head[4] & flags == flags:
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
