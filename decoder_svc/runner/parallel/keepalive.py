"""Probes of TCP on the connections between ranks, so that a machine that has vanished is noticed within 25 s.

They also keep firewalls on the way from forgetting a connection on which nothing is sent while no request runs.
"""

from __future__ import annotations

import os
import pathlib
import socket

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
    for file in pathlib.Path("/proc/self/fd").iterdir():
        try:
            number = os.dup(int(file.name))
        except OSError:
            # It was the file with which this folder is read, or another thread has closed it.
            continue
        try:
            sock = socket.socket(fileno=number)
        except OSError:
            # It is no socket.
            os.close(number)
            continue
        with sock:
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                keep_alive(sock)
