"""A server that forwards to a real one, until a test makes it lie, close connections or stall."""

from __future__ import annotations

import contextlib
import enum
import pathlib
import socket
import tempfile
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader

_AGGREGATES = b"*~>%|"


class After(enum.Enum):
    """Behaviour of the server after a lie."""

    GO_ON = "go on"
    CLOSE = "close"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Lie:
    """Misbehaviour for one command and those that follow it."""

    # Index of the command, counted over all connections since the lie began.
    at: int
    # (number of commands since that one, the true reply) → the reply that is sent.
    tell: Callable[[int, bytes], bytes]
    after: After = After.GO_ON
    # With GO_ON, a client that sends nothing for this time is cut off, as it waits for more bytes. Seconds.
    linger_s: float = 1.0
    # (number of commands since that one, the command) → the command that the real server gets.
    ask: Callable[[int, bytes], bytes] = lambda later, command: command
    # Commands without these bytes are forwarded honestly and not counted.
    about: bytes = b""


def instead(reply: bytes) -> Callable[[int, bytes], bytes]:
    """Returns a lie that sends this reply once and true replies afterwards."""
    return lambda later, true: true if later else reply


def changed(change: Callable[[bytes], bytes]) -> Callable[[int, bytes], bytes]:
    """Returns a lie that changes one true reply."""
    return lambda later, true: true if later else change(true)


def always(reply: bytes) -> Callable[[int, bytes], bytes]:
    """Returns a lie that sends this reply to every command."""
    return lambda later, true: reply


def swapped() -> Callable[[int, bytes], bytes]:
    """Returns a lie that sends two replies in the wrong order. For one use."""
    held: list[bytes] = []

    def tell(later: int, true: bytes) -> bytes:
        if later == 0:
            held.append(true)
            return b""
        return true + held.pop() if held else true

    return tell


class RespServer:
    """A server on a unix socket with one connection to the real server at `url` for each of its own."""

    def __init__(self, url: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="resp-")
        self._path = str(pathlib.Path(self._folder.name) / "socket")
        self._real_path = urllib.parse.unquote(urllib.parse.urlsplit(url).path)
        self._lock = threading.Lock()
        self._lie: Lie | None = None
        # Number of commands that the lie has applied to.
        self._num_told = 0
        self._commands: list[bytes] = []
        self._connections: list[tuple[threading.Thread, socket.socket, socket.socket]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(64)
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def url(self) -> str:
        """URL of this server for clients."""
        return f"unix://{self._path}"

    @property
    def commands(self) -> list[bytes]:
        """Names of the commands since `lie` was called."""
        with self._lock:
            return list(self._commands)

    def lie(self, lie: Lie | None) -> None:
        """Sets the lie and restarts its count of commands. Closes all connections of clients."""
        with self._lock:
            connections, self._connections = self._connections, []
        for thread, *sockets in connections:
            for sock in sockets:
                _close(sock)
            thread.join()
        with self._lock:
            self._lie, self._num_told, self._commands = lie, 0, []

    def close(self) -> None:
        """Closes all connections and ends the threads."""
        _close(self._listener)
        self._acceptor.join()
        self.lie(None)
        self._folder.cleanup()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                real = socket.socket(socket.AF_UNIX)
                real.connect(self._real_path)
                thread = threading.Thread(target=self._serve, args=(client, real), daemon=True)
                with self._lock:
                    self._connections.append((thread, client, real))
                    thread.start()

    def _serve(self, client: socket.socket, real: socket.socket) -> None:
        must_close = True
        with contextlib.suppress(OSError, EOFError):
            must_close = self._answer(client, real)
        if must_close:
            _close(client)
            _close(real)

    def _answer(self, client: socket.socket, real: socket.socket) -> bool:
        """Replies to commands until a lie ends that. Returns whether to close the connections."""
        requests, replies = client.makefile("rb"), real.makefile("rb")
        while True:
            command, name = _read_command(requests)
            lie, later = self._note(command, name)
            if lie is None:
                real.sendall(command)
                client.sendall(_read_reply(replies))
            else:
                real.sendall(lie.ask(later, command))
                client.sendall(lie.tell(later, _read_reply(replies)))
                if lie.after is not After.GO_ON:
                    return lie.after is After.CLOSE
                client.settimeout(lie.linger_s)
            if name == b"SUBSCRIBE":
                threading.Thread(target=_forward, args=(real, client), daemon=True).start()
                _forward(client, real)

    def _note(self, command: bytes, name: bytes) -> tuple[Lie | None, int]:
        """Returns (the lie that applies to this command, number of commands since its first)."""
        with self._lock:
            self._commands.append(name)
            lie = self._lie
            if lie is None or lie.about not in command:
                return None, 0
            later = self._num_told - lie.at
            self._num_told += 1
            return (lie, later) if later >= 0 else (None, 0)


def _read_command(stream: BufferedReader) -> tuple[bytes, bytes]:
    """Returns (bytes of the next command, its name in capitals)."""
    command = _read_line(stream)
    arguments = []
    for _ in range(int(command[1:])):
        head = _read_line(stream)
        arguments.append(_read_exactly(stream, int(head[1:]) + 2))
        command += head + arguments[-1]
    return command, arguments[0][:-2].upper()


def _read_reply(stream: BufferedReader) -> bytes:
    """Returns the bytes of one reply with all its nested values."""
    line = _read_line(stream)
    kind, length = line[:1], line[1:-2]
    if kind == b"$" and length != b"-1":
        return line + _read_exactly(stream, int(length) + 2)
    if kind in _AGGREGATES and length != b"-1":
        return line + b"".join(_read_reply(stream) for _ in range(int(length) * (2 if kind in b"%|" else 1)))
    return line


def _read_line(stream: BufferedReader) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line


def _read_exactly(stream: BufferedReader, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
