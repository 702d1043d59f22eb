"""Rank 0 lets ranks in whatever else comes."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from decoder_svc.runner.parallel.rank_handshake import introduce
from decoder_svc.runner.parallel.rank_listener import RankListener
from lookonce.errors import ConfigurationError

FACTS = (b"k" * 32, "1.0", "digest")
TIMEOUT_S = 60


@pytest.fixture
def listener() -> Iterator[RankListener]:
    with RankListener("127.0.0.1", 0, *FACTS) as found:
        yield found


@contextlib.contextmanager
def holding(port: int, number: int) -> Iterator[None]:
    """A stranger that holds so many silent connections, and renews those that are cut."""
    is_over = threading.Event()

    def hold() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as sock:
                sock.settimeout(0.5)
                while not is_over.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not sock.recv(1):
                            break

    threads = [threading.Thread(target=hold) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("number", [31, 33, 64])
def test_silent_strangers_do_not_keep_a_rank_out(listener: RankListener, number: int) -> None:
    with holding(listener.port, number), ThreadPoolExecutor(1) as pool:
        come = pool.submit(listener.wait_for, 1)
        sock = socket.create_connection(("127.0.0.1", listener.port))
        with introduce(sock, *FACTS):
            (found,), address = come.result(TIMEOUT_S)
            assert address == "127.0.0.1"
            found.close()


def test_many_strangers_leave_few_lines_in_the_log_and_no_connections(
    listener: RankListener, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(500):
            with socket.create_connection(("127.0.0.1", listener.port)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        deadline_s = time.monotonic() + TIMEOUT_S
        while listener._cutters and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert not listener._cutters
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) < 100
    assert "is no rank of this decoder" in lines[0]


def test_a_port_that_is_taken_is_refused(listener: RankListener) -> None:
    with pytest.raises(ConfigurationError, match="rank_listen: cannot listen"):
        RankListener("127.0.0.1", listener.port, *FACTS)


def test_ranks_that_come_when_nobody_waits_any_more_are_cut() -> None:
    with contextlib.ExitStack() as listening:
        listener = listening.enter_context(RankListener("127.0.0.1", 0, *FACTS))
        with introduce(socket.create_connection(("127.0.0.1", listener.port)), *FACTS) as rank:
            listening.close()
            assert rank.poll(TIMEOUT_S)
            with pytest.raises((EOFError, OSError)):
                rank.recv_bytes()
