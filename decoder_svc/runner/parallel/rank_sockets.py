"""The sockets of the ranks: probes of TCP on connections, and no listeners once all have met.

The probes notice within 25 s that a machine has vanished. They also keep firewalls on the way from forgetting a
connection on which nothing is sent while no request runs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator

_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # Seconds without data until the first probe and between two, and the number of probes without an answer.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # Milliseconds for data that are on the way.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
)


def keep_alive(sock: socket.socket) -> None:
    """Sets the probes of a TCP socket."""
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)


def keep_all_alive() -> None:
    """Sets the probes of all TCP sockets of this process. PyTorch's engine does not give its own out."""
    for _, sock in _tcp_sockets():
        with sock:
            keep_alive(sock)


def listeners() -> dict[int, socket.AddressFamily]:
    """Returns the families of the sockets of this process that listen, by the numbers of their files."""
    found = {}
    for number, sock in _tcp_sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[number] = sock.family
    return found


def replace_listeners(known: Collection[int]) -> None:
    """Closes the sockets of this process that listen, but for the known ones, once nobody is to connect any more.

    PyTorch's engine keeps its own open. It holds every connection of a stranger for good, and ends the process when it
    may have no more files. It cannot be told to close, so another socket, to which nobody can connect, takes the place.
    """
    for number, family in listeners().items():
        if number not in known:
            with socket.socket(family, socket.SOCK_STREAM) as nobodys:
                os.dup2(nobodys.fileno(), number, inheritable=False)


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yields the number of the file of each TCP socket of this process, and the socket under another number."""
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:
            # It was the file with which this folder is read, or another thread has closed it.
            continue
        try:
            sock = socket.socket(fileno=number)
        except OSError:
            # It is no socket.
            os.close(number)
            continue
        if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
            yield int(name), sock
        else:
            sock.close()
