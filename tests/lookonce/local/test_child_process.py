"""Child processes: readiness, the end of their logs, and their end with their parent."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from lookonce.errors import StartupError
from lookonce.local.child_process import ChildProcess
from tests.lookonce.local.processes import is_gone, soon, wait_until

ROOT = pathlib.Path(__file__).parents[3]
SERVICE = "tests.lookonce.server.serving_program"
ARGUMENTS = ["--model", ".", "--drain-timeout-s", "0"]


@pytest.fixture
def start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ChildProcess]]:
    """Starts the small test service as a child process."""
    monkeypatch.chdir(ROOT)
    children: list[ChildProcess] = []

    def start_child(*flags: str) -> ChildProcess:
        name = f"service-{len(children)}"
        children.append(ChildProcess(name, SERVICE, [*ARGUMENTS, *flags], tmp_path))
        return children[-1]

    yield start_child
    for child in children:
        child.stop(5)


def test_a_child_reports_its_address_and_drains_on_stop(start: Callable[..., ChildProcess]) -> None:
    child = start("--metrics-listen", "127.0.0.1:0")
    child.wait_until_ready(soon())
    assert child.ready.target.startswith("127.0.0.1:")
    assert child.ready.metrics_port is not None
    assert child.returncode is None
    assert child.stop(10) == 0


def test_a_child_that_cannot_start_shows_the_end_of_its_log(start: Callable[..., ChildProcess]) -> None:
    child = start("--listen", "0.0.0.0:0")
    with pytest.raises(StartupError, match=r"status 2(.|\n)*plaintext"):
        child.wait_until_ready(soon())


def test_a_child_that_is_not_ready_in_time_is_reported(start: Callable[..., ChildProcess]) -> None:
    child = start()
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(StartupError, match="in time"):
        child.wait_until_ready(time.monotonic() + 0.2)
    os.kill(child.pid, signal.SIGCONT)


def test_a_frozen_child_is_killed_after_the_timeout(start: Callable[..., ChildProcess]) -> None:
    child = start()
    child.wait_until_ready(soon())
    os.kill(child.pid, signal.SIGSTOP)
    assert child.stop(0.3) == -signal.SIGKILL


def test_ctrl_c_in_the_terminal_reaches_the_parent_only(start: Callable[..., ChildProcess]) -> None:
    child = start()
    child.wait_until_ready(soon())
    assert os.getsid(child.pid) != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent's end")
def test_children_end_with_a_killed_parent(tmp_path: pathlib.Path) -> None:
    script = f"""
import pathlib, sys, time
from lookonce.local.child_process import ChildProcess
child = ChildProcess("child", {SERVICE!r}, {ARGUMENTS!r}, pathlib.Path({str(tmp_path)!r}))
child.wait_until_ready(time.monotonic() + 60)
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
        wait_until(lambda: is_gone(pid))
