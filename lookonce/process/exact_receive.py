"""Receives a known number of bytes from a socket. Imports nothing but sockets, for processes that start often."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress


def receive(connection: socket.socket, num_bytes: int, wait_s: Callable[[], float | None] = lambda: None) -> bytearray:
    """Receives exactly `num_bytes`. `wait_s` is asked each time how long to wait; None: without a limit.

    Raises EOFError when the other side closes, and the TimeoutError of `wait_s`.
    """
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        connection.settimeout(wait_s())
        with suppress(TimeoutError):
            received = connection.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
    return data
