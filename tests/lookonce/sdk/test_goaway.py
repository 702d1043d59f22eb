"""A server that closes a connection with any error code, known or not, costs a call and never the client's process.

A decoder is a client of encoders, and a proxy between them may send any code; 13 is HTTP_1_1_REQUIRED (RFC 9113).
grpcio 1.84 and 1.85 abort the process at codes 13 and 14.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

CODES = [*range(17), 255, 2**32 - 1]
_HEADERS, _SETTINGS, _GOAWAY, _ACK = 1, 4, 7, 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_TIMEOUT_S = 60.0
# Calls each of the addresses that are its arguments.
_CLIENT = """
import sys, grpc
for target in sys.argv[1:]:
    with grpc.insecure_channel(target) as channel:
        try:
            channel.unary_unary("/service/Method")(b"", timeout=20)
        except grpc.RpcError as error:
            print(error.code().name)
"""


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    """An HTTP/2 frame on stream 0 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


def wait_for_headers(received: BinaryIO) -> None:
    """Reads frames up to the one that begins a call."""
    assert received.read(len(_PREFACE)) == _PREFACE
    kind = None
    while kind != _HEADERS:
        head = received.read(9)
        kind = head[3]
        received.read(int.from_bytes(head[:3]))


def refuse(listener: socket.socket, code: int) -> None:
    """Ends each connection with this code when it has called, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as received:
            connection.sendall(frame(_SETTINGS, 0, b"") + frame(_SETTINGS, _ACK, b""))
            wait_for_headers(received)
            connection.sendall(frame(_GOAWAY, 0, struct.pack(">II", 0, code)))


@contextlib.contextmanager
def rude_server(code: int) -> Iterator[str]:
    """Yields the address of a server that refuses every connection with this code."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=(listener, code), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        # Wakes `accept`, which closing the socket does not.
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(_TIMEOUT_S)


def test_no_code_of_a_goaway_ends_the_process() -> None:
    with contextlib.ExitStack() as exits:
        targets = [exits.enter_context(rude_server(code)) for code in CODES]
        command = [sys.executable, "-c", _CLIENT, *targets]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    assert (ended.returncode, ended.stdout.split()) == (0, ["UNAVAILABLE"] * len(CODES)), ended.stderr[-2000:]
