"""The pauses and the limit of restarts. test_local_stack.py restarts a real service."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest

from lookonce.errors import UnavailableError
from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import START_TIMEOUT_S, LocalStack, RedisSource
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.local.supervisor import MAX_RESTARTS, Supervisor
from tests.lookonce.local.processes import wait_until


class Watched:
    """A stack whose only process never becomes ready. By default it ends at once, each time that it is started."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.now_s = 1000.0
        self.lines: list[str] = []
        self.num_starts = 0
        # There is no such module, so a process ends with status 1.
        self.module = "no_such_module"
        self._directory = directory
        self.stack = LocalStack(directory, redis=RedisSource.NONE)
        self.stack.restart = self._start  # type: ignore[method-assign, assignment]
        self.stack.decoders = []
        self.supervisor = Supervisor(self.stack, self.lines.append, lambda: self.now_s)
        self._start(None)

    def _start(self, _: ChildProcess | None) -> ChildProcess:
        self.num_starts += 1
        process = ChildProcess("decoder-0", self.module, [], self._directory)
        if self.module == "no_such_module":
            wait_until(lambda: process.returncode is not None)
        self.stack.decoders[:] = [process]
        return process

    def look_after(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.supervisor.look()


def test_pauses_grow_and_the_number_of_restarts_is_limited(tmp_path: pathlib.Path) -> None:
    watched = Watched(tmp_path)
    for number in range(MAX_RESTARTS):
        pause_s = 0.5 * 2**number
        watched.look_after(0.0)
        assert watched.lines[-1] == f"decoder-0 ended with status 1; it starts again in {pause_s:g} s"
        watched.look_after(pause_s - 0.1)
        assert watched.num_starts == 1 + number
        watched.look_after(0.2)
        assert watched.num_starts == 2 + number
    with pytest.raises(UnavailableError, match=r"5 restarts in 10 minutes did not help\n(.|\n)*no_such_module"):
        watched.look_after(0.0)


def test_a_process_that_does_not_become_ready_is_ended_and_counts(tmp_path: pathlib.Path) -> None:
    watched = Watched(tmp_path)
    # It waits for its input, and is never ready.
    watched.module = "tests.lookonce.local.never_ready"
    watched.look_after(0.0)
    watched.look_after(0.5)
    (process,) = watched.stack.decoders
    watched.look_after(START_TIMEOUT_S)
    assert watched.lines[-1].endswith("it starts again in 0.5 s"), "it still has time"
    watched.look_after(1.0)
    assert process.returncode == -signal.SIGTERM
    assert watched.lines[-1] == "decoder-0 did not become ready in 300 s"
    watched.look_after(0.0)
    assert watched.lines[-1] == "decoder-0 ended with status -15; it starts again in 1 s"


def test_restarts_of_long_ago_do_not_count(tmp_path: pathlib.Path) -> None:
    watched = Watched(tmp_path)
    for number in range(MAX_RESTARTS + 2):
        watched.look_after(601.0)
        watched.look_after(0.5)
        assert watched.num_starts == 2 + number
    assert {line.rpartition(" in ")[2] for line in watched.lines} == {"0.5 s"}


def test_a_killed_cache_server_starts_again_empty_at_its_address(tmp_path: pathlib.Path) -> None:
    lines: list[str] = []
    stack = LocalStack(tmp_path)
    now_s = 0.0
    with EmbeddedRedis() as redis:
        stack.redis, url = redis, redis.url
        supervisor = Supervisor(stack, lines.append, lambda: now_s)
        supervisor.look()
        assert lines == []
        os.kill(redis.pid, signal.SIGKILL)
        wait_until(lambda: not redis.is_running)
        supervisor.look()
        now_s = 0.6
        supervisor.look()
        assert lines == ["the cache server has ended; it starts again in 0.5 s", "the cache server runs again, empty"]
        assert redis.is_running
        assert redis.url == url
