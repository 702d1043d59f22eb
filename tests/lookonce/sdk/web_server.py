"""A web server whose answers are bytes that a test chooses, right or wrong."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40
Handler = Callable[[socket.socket, bytes], None]


def answer(head: str, body: bytes = b"") -> Handler:
    """Returns a handler that sends this answer at once."""

    def send(connection: socket.socket, _: bytes) -> None:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)

    return send


def picture(body: bytes = PICTURE, kind: str = "image/png", more: str = "") -> Handler:
    return answer(f"HTTP/1.1 200 OK\nContent-Type: {kind}\nContent-Length: {len(body)}{more}", body)


class WebServer:
    """A server on this machine that answers each path with a handler, and notes the heads of its requests."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.paths: dict[str, Handler] = {}
        self.heads: list[bytes] = []
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def origin(self) -> str:
        return f"localhost:{self.port}"

    def url(self, path: str) -> str:
        return f"{'https' if self._context else 'http'}://{self.origin}{path}"

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as exits:
            exits.callback(connection.close)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
                exits.callback(connection.close)
            head = b""
            while b"\r\n\r\n" not in head and (more := connection.recv(65536)):
                head += more
            if not head:
                return
            self.heads.append(head)
            path = head.split(b" ")[1].decode()
            self.paths[path](connection, head)
