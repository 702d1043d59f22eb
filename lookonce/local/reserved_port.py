"""Reserves a loopback port before its server runs, so that processes that need each other can start together."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lookonce.errors import ConfigurationError


@contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """Yields a port of 127.0.0.1, reserved inside the block, for a server that sets SO_REUSEADDR (gRPC does).

    0 takes a free one. Raises ConfigurationError for a port that another program listens on, or that is not allowed.

    On Linux such a server may listen on a port that another socket with the same option has bound, and the kernel gives
    a bound port to nobody who asks for any port. On other systems the port is only free when the block starts.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigurationError(
                f"port {port} cannot be used: {error.strerror}; give another one, or 0 for a free one"
            ) from None
        reserved: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield reserved
