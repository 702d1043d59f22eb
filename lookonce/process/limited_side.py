"""The side of limited_process.py that runs in the process. It imports little: each process has its own copy."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# The first byte on the first socket: the process has started.
READY = b"r"


@contextmanager
def limited_side(numbers: str, memory_bytes: int) -> Iterator[tuple[socket.socket, ...]]:
    """Limits the address space of this process, tells the other side that it has started, and returns its sockets.

    `numbers` are those of the sockets, with commas.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C in a terminal reaches all processes of the group, but only the owner may end this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ExitStack() as stack:
        sockets = tuple(stack.enter_context(socket.socket(fileno=int(number))) for number in numbers.split(","))
        sockets[0].sendall(READY)
        yield sockets


def end_with_owner(connection: socket.socket) -> None:
    """Has the kernel end this process as soon as the other side of a socket is closed. Nothing may be received on it.

    Then no thread has to notice: one that computes may hold the interpreter for minutes. Only Linux does it: there,
    SIGIO ends a process that does not handle it.
    """
    if sys.platform == "linux":
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
