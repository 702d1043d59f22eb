"""The side of limited_process.py that runs in the process. It imports little: each process has its own copy."""

from __future__ import annotations

import resource
import signal
import socket
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
