"""Rank 0 waits for the ranks that run on other machines. Strangers do not hold them up."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from decoder_svc.runner.parallel.other_ranks import has_hung_up
from decoder_svc.runner.parallel.rank_handshake import HandshakeError, admit
from lookonce.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Handshakes at one time. Whoever comes next takes the place of the oldest one: a rank needs milliseconds for its own.
_MAX_HANDSHAKES = 32
# Pauses between two looks whether ranks that wait have gone, and between two lines of the log about ranks and about
# strangers, seconds.
_LOOK_S = 0.2
_LOG_S = 60.0
_STRANGER_LOG_S = 1.0


class _Arrival(NamedTuple):
    connection: Connection
    # The address of its machine, and the one of this machine at which it came.
    peer: str
    address: str


class RankListener:
    """Listens for ranks. Use it as a context manager, and once."""

    def __init__(self, host: str, port: int, key: bytes, version: str, model_digest: str) -> None:
        """Raises ConfigurationError if this machine has no such address, or the port is taken."""
        self._facts = key, version, model_digest
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        # After the end, nobody would take a rank.
        self._ending = threading.Lock()
        self._is_over = False
        # The sockets of the handshakes, the oldest first, under numbers of their own, so that they can be cut.
        self._cutters: dict[int, socket.socket] = {}
        self._cutting = threading.Lock()
        # Time of the latest line about a stranger, and those since then.
        self._logged_s = -_STRANGER_LOG_S
        self._num_unlogged = 0
        try:
            self._socket = _listening(host, port)
        except OSError as error:
            raise ConfigurationError(f"rank_listen: cannot listen on {host}:{port}: {error.strerror}") from None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    def __enter__(self) -> RankListener:
        threading.Thread(target=self._accept, name="rank-listener", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._ending:
            self._is_over = True
            while not self._arrivals.empty():
                self._arrivals.get().connection.close()
        # Wakes the thread that waits in `accept`, which closing alone does not.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def wait_for(self, number: int) -> tuple[list[Connection], str]:
        """Waits for so many ranks, however long. Returns them, and the address of this machine at which they came.

        One that goes before all have come loses its place.
        """
        come: list[_Arrival] = []
        logged_s = -_LOG_S
        while len(come) < number:
            if time.monotonic() - logged_s >= _LOG_S:
                logged_s = time.monotonic()
                logger.info("waiting for ranks on port %d: %d of %d have come", self.port, len(come), number)
            try:
                come.append(self._arrivals.get(timeout=_LOOK_S))
                logger.info("a rank has come from %s: %d of %d", come[-1].peer, len(come), number)
            except queue.Empty:
                pass
            come = self._without_strays([one for one in come if not self._is_gone(one)])
        return [one.connection for one in come], come[0].address

    def _is_gone(self, one: _Arrival) -> bool:
        if not has_hung_up([one.connection], timeout_s=0):
            return False
        logger.warning("the rank from %s has gone before all had come", one.peer)
        one.connection.close()
        return True

    def _without_strays(self, come: list[_Arrival]) -> list[_Arrival]:
        """Leaves the ranks that came at the same address as the latest: all must reach this machine at one."""
        kept = [one for one in come if one.address == come[-1].address]
        for one in come:
            if one.address != come[-1].address:
                logger.warning(
                    "the rank from %s came at the address %s, and a later one at %s, which all must use; it is cut off",
                    one.peer,
                    one.address,
                    come[-1].address,
                )
                one.connection.close()
        return kept

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                # It was cut in its shutdown, or this process has no more files.
                time.sleep(_LOOK_S)
                continue
            with self._cutting:
                if len(self._cutters) >= _MAX_HANDSHAKES:
                    _cut(self._cutters.pop(next(iter(self._cutters))))
                cutter = sock.dup()
                self._cutters[cutter.fileno()] = cutter
            arguments = (sock, peer[0], cutter.fileno())
            threading.Thread(target=self._admit, args=arguments, name="rank-handshake", daemon=True).start()

    def _admit(self, sock: socket.socket, peer: str, cutter: int) -> None:
        try:
            address: str = sock.getsockname()[0]
            connection = admit(sock, *self._facts)
            with self._ending:
                if self._is_over:
                    connection.close()
                else:
                    self._arrivals.put(_Arrival(connection, peer, address))
        except (HandshakeError, OSError) as error:
            self._note_stranger(peer, error)
        finally:
            with self._cutting:
                if (own := self._cutters.pop(cutter, None)) is not None:
                    own.close()

    def _note_stranger(self, peer: str, error: Exception) -> None:
        with self._cutting:
            self._num_unlogged += 1
            if time.monotonic() - self._logged_s < _STRANGER_LOG_S:
                return
            number, self._num_unlogged, self._logged_s = self._num_unlogged, 0, time.monotonic()
        others = f" (and {number - 1} others since the last line)" if number > 1 else ""
        logger.warning("what came from %s is no rank of this decoder: %s%s", peer, error, others)


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _listening(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen()
    except BaseException:
        sock.close()
        raise
    return sock
