"""Processes of services that begin with torch and transformers imported: copies of one process that has done it.

Importing these and the modules of the services takes four fifths of the processor time until a service is ready.
Everything else happens as in a process that begins empty: a copy has its own log, environment, session and signals,
and runs the module's `main`.

Tests of what a running service does use it. Tests of its start begin empty processes: `test_main.py` of both services,
`tests/e2e/test_demo.py`, and those with the fixture `stack`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Self
from unittest import mock

from lookonce.local import child_process

# Each line of its input is a request in JSON: a process id, to which it replies the exit status, or `null` while the
# process runs; or a module to run, to which it replies the process id. A copy leaves the loop, so it ends as a program.
_COPIES_ITSELF = """
import ctypes, gc, json, os, runpy, signal, sys

def end_with_parent(number):
    PR_SET_PDEATHSIG = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)

end_with_parent(signal.SIGKILL)
gc.disable()
from lookonce.model.libraries import torchvision_import
from lookonce.model.libraries.lean_transformers import import_lean_transformers
import_lean_transformers(needs_torchvision=torchvision_import.is_installed())
import decoder_svc.service, encoder_svc.service, lookonce.server.serving
gc.freeze()
running = os.getpid()
for line in sys.stdin:
    request = json.loads(line)
    if isinstance(request, int):
        ended, status = os.waitpid(request, os.WNOHANG)
        print(os.waitstatus_to_exitcode(status) if ended else "null", flush=True)
        continue
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
if os.getpid() != running:
    end_with_parent(signal.SIGTERM)
    if os.getppid() != running:
        os._exit(1)
    os.setsid()
    module, arguments, log, folder, variables = request
    nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(nothing, 0), os.dup2(written, 1), os.dup2(written, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[1:] = arguments
    gc.enable()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
# Variables that an interpreter or a library has read when it was imported.
_READ_AT_IMPORT = ("PYTHON", "OMP_", "GOMP_", "MKL_", "LD_", "MALLOC_", "TORCH")
_POLL_S = 0.02


class WarmProcess:
    """A copy that runs a module. It has those parts of `subprocess.Popen` that tests and `ChildProcess` use."""

    def __init__(self, pid: int, status: Callable[[int], int | None]) -> None:
        """`status(pid)` returns the exit status, or None while the process runs."""
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Returns the exit status, minus the signal's number after a signal, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit status. Raises subprocess.TimeoutExpired."""
        deadline_s = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)


class WarmProcesses:
    """A context manager with the process that copies itself. It starts with the first copy, and all end with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._original: subprocess.Popen[str] | None = None
        self._variables: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._original is not None:
            self._original.communicate()

    def start(self, module: str, arguments: Sequence[str], log: pathlib.Path) -> WarmProcess:
        """Runs `python -P -m module` in this folder and environment, with its output at the end of a file."""
        if self._original is None:
            command = [sys.executable, "-P", "-c", _COPIES_ITSELF]
            self._original = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._variables = _read_at_import()
        assert _read_at_import() == self._variables, "the modules have been imported with other settings"
        pid = self._ask([module, list(arguments), str(log.absolute()), str(pathlib.Path.cwd()), dict(os.environ)])
        assert pid is not None
        return WarmProcess(pid, self._ask)

    @contextlib.contextmanager
    def for_stacks(self) -> Iterator[None]:
        """Starts each `ChildProcess` of the block as a copy, unless the environment asks to log its imports."""
        start_empty = child_process.start_program

        def start(module: str, arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes] | WarmProcess:
            if "PYTHONPROFILEIMPORTTIME" in os.environ:
                return start_empty(module, arguments, log)
            return self.start(module, arguments, pathlib.Path(log.name))

        with mock.patch.object(child_process, start_empty.__name__, start):
            yield

    def _ask(self, request: object) -> int | None:
        """Sends a request and returns the reply."""
        assert self._original is not None
        assert self._original.stdin is not None
        assert self._original.stdout is not None
        with self._lock:
            print(json.dumps(request), file=self._original.stdin, flush=True)
            reply: int | None = json.loads(self._original.stdout.readline())
            return reply


def _read_at_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
