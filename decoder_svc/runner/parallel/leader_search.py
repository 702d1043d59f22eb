"""A rank on a machine of its own looks for rank 0, which may start later than it does."""

from __future__ import annotations

import logging
import socket
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from decoder_svc.runner.parallel.messages import Start, received
from decoder_svc.runner.parallel.rank_handshake import HandshakeError, introduce

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_PAUSE_S = 1.0
# Pause between two lines of the log, seconds.
_LOG_S = 60.0


class FoundLeader(NamedTuple):
    """Rank 0, which knows this rank and has all others."""

    connection: Connection
    # This machine's address at which the other ranks reach it; None: they are on this machine.
    address: str | None
    start: Start


def find_leader(host: str, port: int, key: bytes, version: str, model_digest: str) -> FoundLeader:
    """Tries until rank 0 has let this rank in and says what to load.

    Raises ConfigurationError when rank 0 has another key, or refuses this rank.
    """
    logged_s = -_LOG_S
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
            address: str = sock.getsockname()[0]
            connection = introduce(sock, key, version, model_digest)
            logger.info("the decoder at %s:%d has let this rank in; waiting for the others", host, port)
            start = _start(connection)
            if start is not None:
                return FoundLeader(connection, address, start)
            logger.info("the decoder at %s:%d has gone before all ranks had come; looking for it again", host, port)
        except (HandshakeError, OSError) as error:
            # A name that does not resolve may be that of a machine that starts later, or misspelt.
            level = logging.WARNING if isinstance(error, socket.gaierror) else logging.INFO
            if time.monotonic() - logged_s >= _LOG_S:
                logged_s = time.monotonic()
                logger.log(level, "the decoder at %s:%d is not there yet (%s); trying again", host, port, error)
        time.sleep(_PAUSE_S)


def _start(connection: Connection) -> Start | None:
    """Waits for what rank 0 says once all ranks have come; None: it has ended before."""
    try:
        message = received(connection)
    except (EOFError, OSError):
        connection.close()
        return None
    assert isinstance(message, Start), "it is the first message"
    return message
