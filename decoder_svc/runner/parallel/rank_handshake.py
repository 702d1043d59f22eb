"""Rank 0 and a rank on another machine prove to each other that they have one key, before either believes the other.

rank    -> rank 0   Hello       its version, the digest of its model, a number that is used once
rank 0  -> rank     Challenge   a number that is used once, and rank 0's proof
rank    -> rank 0   Proof       its own
rank 0  -> rank     Welcome     or Refusal, with the reason

A proof is an HMAC-SHA-256 under the key of the side that proves, both numbers, version and digest, so that no message
of one side or of an earlier handshake is a proof. What follows is neither encrypted nor authenticated: ranks belong
into a network of their own, as with any engine for distributed tensors.
"""

from __future__ import annotations

import hmac
import pathlib
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from decoder_svc.runner.parallel.rank_sockets import keep_alive
from lookonce.errors import ConfigurationError

MessageT = TypeVar("MessageT")

KEY_BYTES = 32
_DOMAIN = b"lookonce/rank/1:"
_NONCE_BYTES = 32
# A stranger's first message may have any length, and each may come late.
_MAX_MESSAGE_BYTES = 4096
_TIMEOUT_S = 10.0


class Hello(msgspec.Struct, tag=True):
    """The first message of a rank."""

    version: str
    # The digest of the model's configuration and weights (model_digest.py).
    model_digest: str
    nonce: bytes


class Challenge(msgspec.Struct, tag=True):
    """The answer of rank 0, with its proof."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag=True):
    """The proof of a rank."""

    proof: bytes


class Welcome(msgspec.Struct, tag=True):
    """The rank has a place, and waits for its Start."""


class Refusal(msgspec.Struct, tag=True):
    """The rank is not wanted."""

    reason: str


class HandshakeError(Exception):
    """The other side is no rank of this model, or has gone."""


class KeyMismatchError(HandshakeError):
    """The other side has another key."""


# The last message of rank 0, of one of two types.
_ANSWERS: Any = Welcome | Refusal


def read_key(file: pathlib.Path) -> bytes:
    """Reads a key, 64 hex characters, from a file. Raises ConfigurationError for any other content."""
    try:
        key = bytes.fromhex(file.read_text("ascii").strip())
    except (OSError, ValueError) as error:
        raise _unusable(file, type(error).__name__) from None
    if len(key) != KEY_BYTES:
        raise _unusable(file, f"{len(key)} bytes")
    return key


def admit(sock: socket.socket, key: bytes, version: str, model_digest: str) -> Connection:
    """Rank 0's side. Returns the connection to a rank that has the same key, version and model.

    The socket belongs to the connection then. Raises HandshakeError, with the socket closed.
    """
    with _handshake(sock) as connection:
        hello = _received(connection, Hello)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        _send(connection, Challenge(nonce, _proof(key, b"rank 0", hello, nonce)))
        try:
            proof = _received(connection, Proof)
        except HandshakeError:
            raise HandshakeError("it has gone when it got the decoder's proof; it may have another key") from None
        if not hmac.compare_digest(proof.proof, _proof(key, b"rank", hello, nonce)):
            raise KeyMismatchError("it has another key")
        refusal = _refusal(hello, version, model_digest)
        if refusal:
            _send(connection, Refusal(refusal))
            raise HandshakeError(refusal)
        _send(connection, Welcome())
    return connection


def introduce(sock: socket.socket, key: bytes, version: str, model_digest: str) -> Connection:
    """A rank's side. Returns the connection to a rank 0 that has the same key, and has let this rank in.

    The socket belongs to the connection then. Raises HandshakeError, and ConfigurationError when rank 0 has another key
    or refuses this rank; the socket is closed.
    """
    with _handshake(sock) as connection:
        hello = Hello(version, model_digest, secrets.token_bytes(_NONCE_BYTES))
        _send(connection, hello)
        challenge = _received(connection, Challenge)
        if not hmac.compare_digest(challenge.proof, _proof(key, b"rank 0", hello, challenge.nonce)):
            raise ConfigurationError("rank_key_file: the decoder has another key; give both the same file")
        _send(connection, Proof(_proof(key, b"rank", hello, challenge.nonce)))
        answer: Welcome | Refusal = _received(connection, _ANSWERS)
        if isinstance(answer, Refusal):
            raise ConfigurationError(f"the decoder refuses this rank: {answer.reason}")
    return connection


@contextmanager
def _handshake(sock: socket.socket) -> Iterator[Connection]:
    """Makes a connection of a socket. Cuts it when the block takes too long, and closes it if the block raises."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)
    sock.setblocking(True)
    # The same socket under another number, so that it can be cut while the connection has it.
    with sock.dup() as cutter:
        connection = Connection(sock.detach())
        timer = threading.Timer(_TIMEOUT_S, cutter.shutdown, [socket.SHUT_RDWR])
        timer.daemon = True
        timer.start()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        finally:
            timer.cancel()
            timer.join()


def _send(connection: Connection, message: msgspec.Struct) -> None:
    try:
        connection.send_bytes(msgspec.msgpack.encode(message))
    except OSError as error:
        raise HandshakeError(f"it has gone ({type(error).__name__})") from None


def _received(connection: Connection, kind: type[MessageT]) -> MessageT:
    try:
        return msgspec.msgpack.decode(connection.recv_bytes(_MAX_MESSAGE_BYTES), type=kind)
    except msgspec.MsgspecError:
        raise HandshakeError("it sent something else than a rank does") from None
    except (EOFError, OSError) as error:
        raise HandshakeError(f"it has gone, or sent nothing in time ({type(error).__name__})") from None


def _proof(key: bytes, side: bytes, hello: Hello, nonce: bytes) -> bytes:
    facts = [side, hello.version.encode(), hello.model_digest.encode(), hello.nonce, nonce]
    message = _DOMAIN + b"".join(len(fact).to_bytes(8, "little") + fact for fact in facts)
    return hmac.digest(key, message, "sha256")


def _refusal(hello: Hello, version: str, model_digest: str) -> str:
    if hello.version != version:
        return f"it is of version {hello.version}, and the decoder of {version}"
    if hello.model_digest != model_digest:
        return "its model folder has another config.json or other weights than the decoder's"
    return ""


def _unusable(file: pathlib.Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"rank_key_file: {file} must be readable and hold {2 * KEY_BYTES} hex characters ({why}); "
        "`openssl rand -hex 32` makes one"
    )
