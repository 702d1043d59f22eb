"""A copy of the process that has imported torch runs a module as a new process would, and ends with it."""

from __future__ import annotations

import os
import pathlib
import signal

import psutil
import pytest

from lookonce.local.child_process import ChildProcess
from tests.warm_processes import WarmProcesses

# A module of the standard library that runs the program in a file.
RUNS = "trace"


def flags(folder: pathlib.Path, program: str) -> list[str]:
    (folder / "program.py").write_text(program)
    return ["--listfuncs", str(folder / "program.py")]


def test_a_copy_has_its_own_log_environment_and_session_and_tells_its_exit_status(
    warm_processes: WarmProcesses, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN", "by the copy")
    shown = "os.environ['SEEN'], os.getsid(0) == os.getpid(), 'torch' in sys.modules"
    program = f"import os, sys; print({shown}, flush=True); os._exit(3)"
    process = warm_processes.start(RUNS, flags(tmp_path, program), tmp_path / "log")
    assert process.wait(60) == process.poll() == 3
    assert (tmp_path / "log").read_text().splitlines()[-1] == "by the copy True True"


def test_a_copy_that_is_killed_tells_the_signal(warm_processes: WarmProcesses, tmp_path: pathlib.Path) -> None:
    process = warm_processes.start(RUNS, flags(tmp_path, "import time; time.sleep(60)"), tmp_path / "log")
    assert process.poll() is None
    process.kill()
    assert process.wait(60) == -signal.SIGKILL


def test_child_processes_are_copies_in_the_block_only(warm_processes: WarmProcesses, tmp_path: pathlib.Path) -> None:
    found = []
    for blocks in (warm_processes.for_stacks(), pytest.MonkeyPatch.context()):
        with blocks:
            child = ChildProcess("child", RUNS, flags(tmp_path, "import time; time.sleep(60)"), tmp_path)
        found.append(psutil.Process(child.pid).ppid() == os.getpid())
        child.stop(60)
    assert found == [False, True]
