"""A server that answers what a real one behind it answers, until it is told to lie, to break off or to fall silent."""

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
    """What follows a lie."""

    GO_ON = "go on"
    CLOSE = "close"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Lie:
    """What becomes of one command and those behind it."""

    # Which command, counted over all connections from when the lie began.
    at: int
    # (how many commands later, the true reply) → what is sent.
    tell: Callable[[int, bytes], bytes]
    after: After = After.GO_ON
    # Going on, a client that asks for nothing for so long is cut off: it waits for more than it was told. Seconds.
    linger_s: float = 1.0
    # (how many commands later, the command) → what the real server is asked.
    ask: Callable[[int, bytes], bytes] = lambda later, command: command
    # Commands without these bytes are answered truthfully, and not counted.
    about: bytes = b""


def instead(reply: bytes) -> Callable[[int, bytes], bytes]:
    """Tells this once, and the truth from then on."""
    return lambda later, true: true if later else reply


def changed(change: Callable[[bytes], bytes]) -> Callable[[int, bytes], bytes]:
    """Changes the true reply once."""
    return lambda later, true: true if later else change(true)


def always(reply: bytes) -> Callable[[int, bytes], bytes]:
    """Tells nothing else any more."""
    return lambda later, true: reply


def swapped() -> Callable[[int, bytes], bytes]:
    """Two replies in the wrong order. For one use."""
    held: list[bytes] = []

    def tell(later: int, true: bytes) -> bytes:
        if later == 0:
            held.append(true)
            return b""
        return true + held.pop() if held else true

    return tell


class RespServer:
    """Listens on a unix socket; each connection has its own to the real server at `url`."""

    def __init__(self, url: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="resp-")
        self._path = str(pathlib.Path(self._folder.name) / "socket")
        self._real_path = urllib.parse.unquote(urllib.parse.urlsplit(url).path)
        self._lock = threading.Lock()
        self._lie: Lie | None = None
        # How many commands there were that it is about.
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
        """Where clients connect."""
        return f"unix://{self._path}"

    @property
    def commands(self) -> list[bytes]:
        """Names of the commands since the last lie was told."""
        with self._lock:
            return list(self._commands)

    def lie(self, lie: Lie | None) -> None:
        """Does so from now on. Commands are counted anew; all clients have to connect again."""
        with self._lock:
            connections, self._connections = self._connections, []
        for thread, *sockets in connections:
            for sock in sockets:
                _close(sock)
            thread.join()
        with self._lock:
            self._lie, self._num_told, self._commands = lie, 0, []

    def close(self) -> None:
        """Ends all connections and threads."""
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
        """Answers commands; returns whether to close the connections."""
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
        """(the lie that holds for this command, how many commands after it began)."""
        with self._lock:
            self._commands.append(name)
            lie = self._lie
            if lie is None or lie.about not in command:
                return None, 0
            later = self._num_told - lie.at
            self._num_told += 1
            return (lie, later) if later >= 0 else (None, 0)


def _read_command(stream: BufferedReader) -> tuple[bytes, bytes]:
    """(its bytes, its name in capitals)."""
    command = _read_line(stream)
    arguments = []
    for _ in range(int(command[1:])):
        head = _read_line(stream)
        arguments.append(_read_exactly(stream, int(head[1:]) + 2))
        command += head + arguments[-1]
    return command, arguments[0][:-2].upper()


def _read_reply(stream: BufferedReader) -> bytes:
    """The bytes of one reply, of any depth."""
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
