"""A socket between the service and its engine process, which carries whole messages.

    message = frame length (8 bytes) | payload length (8 bytes) | frame | payload

The payload is for embedding rows, which are not copied into a frame.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from lookonce.process.exact_receive import receive

_LENGTHS = struct.Struct("<QQ")
# Size of the socket's buffer, bytes. It holds the answers of some hundred steps of 64 requests, so that a service
# that is busy for a moment does not stop the engine. The kernel may grant less.
_BUFFER_BYTES = 4 << 20


class Pipe:
    """One end. At most one thread sends and at most one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)

    def send(self, frame: bytes, payload: bytes | bytearray = b"") -> None:
        """Sends a message; waits while the other end is behind. Raises OSError when that end is closed."""
        self._socket.sendall(_LENGTHS.pack(len(frame), len(payload)) + frame)
        if payload:
            self._socket.sendall(payload)

    def receive(self) -> tuple[bytearray, bytearray]:
        """Waits for a message and returns its frame and payload. Raises EOFError or OSError after the last one."""
        num_frame_bytes, num_payload_bytes = _LENGTHS.unpack(receive(self._socket, _LENGTHS.size))
        frame = receive(self._socket, num_frame_bytes)
        return frame, receive(self._socket, num_payload_bytes)

    def shut_down(self) -> None:
        """Ends both ends' `receive` and `send`; any thread may call it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this end, which nobody must be using."""
        self._socket.close()
