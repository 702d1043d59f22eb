"""A pipe carries whole messages in order, and ends for both sides."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from decoder_svc.engine.process.pipe import Pipe


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, Pipe]]:
    ours, theirs = map(Pipe, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    sent: list[tuple[bytes, bytes]] = [
        (b"", b""),
        (b"frame", b""),
        (b"x" * 100_000, b"y" * 9_000_000),
        (b"last", b"rows"),
    ]

    def send() -> None:
        for frame, payload in sent:
            ours.send(frame, payload)

    sender = threading.Thread(target=send)
    sender.start()
    assert [tuple(map(bytes, theirs.receive())) for _ in sent] == sent
    sender.join()


def test_a_shut_down_ends_who_receives_and_who_sends(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    ended = threading.Event()

    def receive() -> None:
        with pytest.raises(EOFError):
            ours.receive()
        ended.set()

    receiver = threading.Thread(target=receive)
    receiver.start()
    ours.shut_down()
    assert ended.wait(60)
    receiver.join()
    with pytest.raises(BrokenPipeError):
        theirs.send(b"frame")
    with pytest.raises(EOFError):
        theirs.receive()


def test_half_a_message_is_no_message(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    ours._socket.sendall(b"\x05\0\0\0\0\0\0\0" + b"\0" * 8 + b"fra")
    ours.shut_down()
    with pytest.raises(EOFError):
        theirs.receive()
