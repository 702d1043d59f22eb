"""One deadline bounds a whole exchange on any system, and bytes are counted as they arrive."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.miss_reason import MissReason, RedisTroubleError

# Much longer than the deadline, and shorter than the trickling bytes would take.
HANG_S = 5.0


@contextlib.contextmanager
def trickle(data: bytes, *, num_drops: int = 0, pause_s: float = 0.05) -> Iterator[socket.socket]:
    """Yields the client's end of a connection on which `data` has arrived and single bytes follow with pauses."""
    ours, theirs = socket.socketpair()
    is_over = threading.Event()

    def send() -> None:
        for _ in range(num_drops):
            if is_over.wait(pause_s):
                return
            theirs.sendall(b"x")

    thread = threading.Thread(target=send)
    with ours, theirs:
        theirs.sendall(data)
        thread.start()
        try:
            yield ours
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_reply_that_trickles_ends_at_the_deadline(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("needs Linux's MSG_WAITALL")
    monkeypatch.setattr(sys, "platform", platform)
    with trickle(b"$1000\r\n12345", num_drops=200) as sock:
        started_s = time.monotonic()
        exchange = Exchange(sock, started_s + 0.3)
        with pytest.raises(RedisTroubleError) as caught:
            exchange.read_bulk()
        assert caught.value.reason is MissReason.SLOW
        assert 0.3 <= time.monotonic() - started_s < HANG_S
        assert 5 <= exchange.num_bulk_bytes < 200, "what came counts, although the string was broken off"


class WatchedSocket(socket.socket):
    """A socket that remembers the flags of its last receive."""

    flags: int | None = None

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self.flags = flags
        return super().recv_into(buffer, nbytes, flags)


@pytest.mark.parametrize(("platform", "flags"), [("linux", socket.MSG_WAITALL), ("darwin", 0)])
def test_only_linux_lets_the_kernel_keep_the_deadline(
    platform: str, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with trickle(b"$8000\r\n" + b"x" * 8000 + b"\r\n") as sock, WatchedSocket(fileno=sock.detach()) as watched:
        exchange = Exchange(watched, time.monotonic() + HANG_S)
        assert exchange.read_bulk_into(memoryview(bytearray(8000))) == exchange.num_bulk_bytes == 8000
        assert watched.flags == flags
        assert (watched.gettimeout() is None) == (platform == "linux")
