"""Faults for real servers: a proxy that interrupts a connection at a chosen point, and a function that kills."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# Matches a GETRANGE that does not start at 0 and so requests rows.
_ROWS_REQUEST = re.compile(rb"GETRANGE\r\n\$\d+\r\nlookonce:[^\r]*\r\n\$\d+\r\n(?!0\r\n)")


@dataclass(slots=True)
class Faults:
    """The faults that the proxy injects into every connection. Changes take effect at once."""

    # Called before a client's request for rows is forwarded.
    before_rows: Callable[[], None] | None = None
    # The connection is reset after this many bytes of replies. None: never.
    cut_after_bytes: int | None = None
    # Pause after each byte of a reply, seconds. 0: full speed.
    pause_s: float = 0.0
    # Speed at which requests are read. None: full speed.
    request_bytes_per_s: float | None = None
    # Bytes sent in place of the server's replies.
    forged_reply: bytes | None = None


class FaultProxy:
    """A proxy on a free loopback port for the unix socket `server_path`; uses TLS if given a context."""

    def __init__(self, server_path: str, tls: ssl.SSLContext | None = None) -> None:
        self.faults = Faults()
        # Connections that clients have made so far.
        self.num_connections = 0
        # Requests for rows that clients have sent so far.
        self.num_row_requests = 0
        # While cleared, replies are held back.
        self.may_reply = threading.Event()
        self.may_reply.set()
        self._tls = tls
        self._server_path = server_path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    @property
    def url(self) -> str:
        """URL of the proxy for clients."""
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Closes all connections and waits for the threads."""
        self.may_reply.set()
        for sock in self._sockets:
            _close(sock)
        for thread in self._threads:
            thread.join()

    def _run(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                # A client that breaks off the TLS handshake must not end the proxy.
                with contextlib.suppress(OSError):
                    self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        if self._tls is not None:
            client = self._tls.wrap_socket(client, server_side=True)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._server_path)
        self._sockets += [client, server]
        self.num_connections += 1
        self._run(lambda: self._forward_requests(client, server))
        self._run(lambda: self._forward_replies(server, client))

    def _forward_requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                num_row_requests = len(_ROWS_REQUEST.findall(data))
                if num_row_requests and self.faults.before_rows is not None:
                    self.faults.before_rows()
                self.num_row_requests += num_row_requests
                if self.faults.request_bytes_per_s is not None:
                    time.sleep(len(data) / self.faults.request_bytes_per_s)
                server.sendall(data)
        _close(server)

    def _forward_replies(self, server: socket.socket, client: socket.socket) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                self.may_reply.wait()
                if self.faults.forged_reply is not None:
                    data = self.faults.forged_reply
                cut = self.faults.cut_after_bytes
                if cut is not None and num_bytes + len(data) > cut:
                    client.sendall(data[: cut - num_bytes])
                    break
                num_bytes += len(data)
                self._send(client, data)
        _close(client)

    def _send(self, client: socket.socket, data: bytes) -> None:
        if self.faults.pause_s == 0:
            client.sendall(data)
            return
        for index in range(len(data)):
            client.sendall(data[index : index + 1])
            time.sleep(self.faults.pause_s)


def kill_child(pid: int) -> None:
    """Kills a child process and waits until it is dead. Its exit status stays available to its owner."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
