"""A loopback port that is known before its server runs, so that processes which need each other start side by side."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of 127.0.0.1 for a server that sets SO_REUSEADDR (gRPC does), nobody else's inside the block.

    Linux lets such a server listen on a port that is bound, but not listened on, by a socket with the same option, and
    gives the port to no one who asks for any. Elsewhere the port is merely free at this moment.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port
