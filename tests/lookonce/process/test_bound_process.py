"""A bound process imports what its parent does, ignores signals for all, and never outlives its parent."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from lookonce.process.bound_process import start_bound_process

TIMEOUT_S = 60
# A parent that starts a process and is killed at once.
_SHORT_LIVED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from lookonce.process.bound_process import start_bound_process
print(start_bound_process("sleeper", [], []).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a module that writes to the file that its first argument opens, and sleeps."""
    text = "import os, sys, time\nfor fd in sys.argv[1:]: os.write(int(fd), b'ready')\ntime.sleep(600)\n"
    (tmp_path / "sleeper.py").write_text(text)
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_process_ends_with_its_parent_however_soon_that_ends(folder: pathlib.Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(3):
        command = [sys.executable, "-c", _SHORT_LIVED, str(folder)]
        parent = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert parent.returncode == -signal.SIGKILL, parent.stderr
        _until_ended(int(parent.stdout))


def _until_ended(pid: int) -> None:
    """Waits until a process has ended; nobody may be there to take note of its end."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_it_has_the_import_path_of_its_parent_and_ignores_signals_for_all(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    readable, writable = os.pipe()
    process = start_bound_process("sleeper", [str(writable)], [writable])
    os.close(writable)
    with open(readable, "rb") as written:
        assert written.read(5) == b"ready", "it has found the module, and runs"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert os.getpgid(process.pid) != os.getpgid(0), "Ctrl-C reaches the parent's group alone"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.kill()
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL


def test_variables_are_added_to_its_parents_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "teller.py").write_text(
        "import os, sys\nos.write(int(sys.argv[1]), repr(os.environ['A B']).encode())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for own, given, expected in (("parent", {}, b"'parent'"), ("parent", {"A B": "own"}, b"'own'")):
        monkeypatch.setenv("A B", own)
        readable, writable = os.pipe()
        process = start_bound_process("teller", [str(writable)], [writable], given)
        os.close(writable)
        with open(readable, "rb") as written:
            assert written.read() == expected
        assert process.wait(TIMEOUT_S) == 0
    assert os.environ["A B"] == "parent"
