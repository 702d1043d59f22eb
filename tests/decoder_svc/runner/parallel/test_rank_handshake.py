"""Rank 0 and ranks on other machines believe each other only with one key, and nobody else holds them up."""

from __future__ import annotations

import contextlib
import hmac
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.runner.parallel import rank_handshake
from decoder_svc.runner.parallel.rank_handshake import (
    Challenge,
    HandshakeError,
    Hello,
    KeyMismatchError,
    Proof,
    Welcome,
    admit,
    introduce,
    read_key,
)
from lookonce.errors import ConfigurationError

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
FACTS = KEY, "1.0", "digest"


@contextlib.contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def both(ours: tuple[bytes, str, str], theirs: tuple[bytes, str, str]) -> list[Connection | Exception]:
    """Returns what rank 0 and the rank get, a connection or what they raise."""
    with sockets() as (one, other), ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(admit, one, *ours), threads.submit(introduce, other, *theirs)]
        found: list[Any] = [call.exception() or call.result() for call in calls]
        return found


def expected_proof(key: bytes, side: bytes, version: str, digest: str, nonces: tuple[bytes, bytes]) -> bytes:
    """The rule, written anew: HMAC-SHA-256 over all facts, each behind its length."""
    message = b"lookonce/rank/1:"
    for fact in (side, version.encode(), digest.encode(), *nonces):
        message += len(fact).to_bytes(8, "little") + fact
    return hmac.new(key, message, "sha256").digest()


class Stranger:
    """Speaks the messages without the code of a rank."""

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock.detach())

    def say(self, message: msgspec.Struct) -> None:
        self.connection.send_bytes(msgspec.msgpack.encode(message))

    def hear(self, kind: Any) -> Any:
        return msgspec.msgpack.decode(self.connection.recv_bytes(), type=kind)


def test_two_with_one_key_get_a_connection() -> None:
    ours, theirs = both(FACTS, FACTS)
    assert isinstance(ours, Connection)
    assert isinstance(theirs, Connection)
    with ours, theirs:
        ours.send_bytes(b"there")
        assert theirs.recv_bytes() == b"there"
        theirs.send_bytes(b"back")
        assert ours.recv_bytes() == b"back"


def test_another_key_is_noticed_by_the_rank_first() -> None:
    ours, theirs = both(FACTS, (OTHER_KEY, *FACTS[1:]))
    assert isinstance(ours, HandshakeError)
    assert isinstance(theirs, ConfigurationError)
    assert "another key" in theirs.message


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ((KEY, "1.1", "digest"), "of version 1.1, and the decoder of 1.0"),
        ((KEY, "1.0", "another"), "other weights"),
    ],
)
def test_another_version_or_model_is_refused_with_the_reason(theirs: tuple[bytes, str, str], reason: str) -> None:
    ours, refused = both(FACTS, theirs)
    assert isinstance(ours, HandshakeError)
    assert reason in str(ours)
    assert isinstance(refused, ConfigurationError)
    assert reason in refused.message


@pytest.mark.parametrize(
    ("key", "side", "is_admitted"),
    [(KEY, b"rank", True), (OTHER_KEY, b"rank", False), (KEY, b"rank 0", False)],
    ids=["right", "other key", "rank 0's own proof"],
)
def test_the_proof_is_that_of_the_rule(key: bytes, side: bytes, is_admitted: bool) -> None:
    with sockets() as (one, other), ThreadPoolExecutor(1) as threads:
        call = threads.submit(admit, one, *FACTS)
        stranger = Stranger(other)
        stranger.say(Hello("1.0", "digest", b"n" * 32))
        challenge = stranger.hear(Challenge)
        nonces = b"n" * 32, challenge.nonce
        assert challenge.proof == expected_proof(KEY, b"rank 0", "1.0", "digest", nonces)
        stranger.say(Proof(expected_proof(key, side, "1.0", "digest", nonces)))
        if is_admitted:
            assert isinstance(stranger.hear(Welcome), Welcome)
            call.result().close()
        else:
            with pytest.raises(KeyMismatchError):
                call.result()


def test_messages_of_an_earlier_handshake_prove_nothing() -> None:
    said = [Hello("1.0", "digest", b"n" * 32)]
    with sockets() as (one, other), ThreadPoolExecutor(1) as threads:
        call = threads.submit(admit, one, *FACTS)
        stranger = Stranger(other)
        stranger.say(said[0])
        nonces = b"n" * 32, stranger.hear(Challenge).nonce
        proof = Proof(expected_proof(KEY, b"rank", "1.0", "digest", nonces))
        stranger.say(proof)
        call.result().close()
    with sockets() as (one, other), ThreadPoolExecutor(1) as threads:
        call = threads.submit(admit, one, *FACTS)
        stranger = Stranger(other)
        stranger.say(said[0])
        stranger.say(proof)
        with pytest.raises(KeyMismatchError):
            call.result()


def test_what_a_decoder_without_the_key_says_is_not_believed() -> None:
    with sockets() as (one, other), ThreadPoolExecutor(1) as threads:
        call = threads.submit(introduce, one, *FACTS)
        stranger = Stranger(other)
        hello = stranger.hear(Hello)
        nonces = hello.nonce, b"n" * 32
        stranger.say(Challenge(b"n" * 32, expected_proof(OTHER_KEY, b"rank 0", "1.0", "digest", nonces)))
        with pytest.raises(ConfigurationError, match="another key"):
            call.result()
        with pytest.raises((EOFError, OSError)):
            stranger.hear(Proof)


@given(st.binary(max_size=300))
def test_nothing_else_is_a_rank(data: bytes) -> None:
    with sockets() as (one, other), ThreadPoolExecutor(1) as threads:
        call = threads.submit(admit, one, *FACTS)
        with contextlib.suppress(OSError):
            other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError):
            call.result()


def test_a_long_first_message_is_not_read() -> None:
    with sockets() as (one, other), ThreadPoolExecutor(1) as threads:
        call = threads.submit(admit, one, *FACTS)
        other.sendall((1 << 30).to_bytes(4, "big"))
        with pytest.raises(HandshakeError):
            call.result()


def silent(_: socket.socket) -> None:
    """A stranger that says nothing."""


def drips(sock: socket.socket) -> None:
    """A stranger that speaks slowly, a byte at a time."""
    with contextlib.suppress(OSError):
        for byte in (4000).to_bytes(4, "big") + b"x" * 4000:
            sock.send(bytes([byte]))
            time.sleep(0.01)


@pytest.mark.parametrize("speaks", [silent, drips])
def test_one_who_takes_too_long_is_cut(
    speaks: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_handshake, "_TIMEOUT_S", 0.2)
    with sockets() as (one, other):
        speaker = threading.Thread(target=speaks, args=(other,))
        speaker.start()
        with pytest.raises(HandshakeError):
            admit(one, *FACTS)
        speaker.join()


@pytest.mark.parametrize("content", [b"", b"zz" * 32, b"ab" * 31, b"ab" * 33, b"\xff"])
def test_a_file_that_holds_no_key_is_refused(content: bytes, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"rank_key_file: .* 64 hex characters"):
        read_key(file)
    with pytest.raises(ConfigurationError, match="rank_key_file"):
        read_key(tmp_path / "missing")


def test_a_key_may_end_with_a_line_break(tmp_path: pathlib.Path) -> None:
    (tmp_path / "key").write_text("ab" * 32 + "\n")
    assert read_key(tmp_path / "key") == b"\xab" * 32
