"""A Python process that ends with its parent, writes a file when it is ready, and logs to a file.

It may run any module with a `--ready-file` flag.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from lookonce.errors import StartupError

_POLL_S = 0.05
_TAIL_LINES = 20
# Runs between fork and the program: asks the kernel to end the process with its parent, and exits if the parent has
# already ended. A `preexec_fn` could do the same, but may deadlock beside gRPC's threads.
_EXEC_SCRIPT = """\
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class ReadyRecord:
    """Content of a service's ready file."""

    # host:port of the server.
    target: str
    # host:port of the admin service, None without one.
    admin_target: str | None
    # Port of the Prometheus endpoint, None without one.
    metrics_port: int | None


class ChildProcess:
    """One `python -m module` process.

    On Linux the process gets SIGTERM when the *thread* that started it ends, so start it from the main thread or from
    another long-lived one. Elsewhere only `stop` ends it. Ctrl-C in a terminal does not reach it.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], directory: pathlib.Path) -> None:
        """Starts the process with the ready file `directory/name.json` and the log `directory/name.log`."""
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._ready_path = directory / f"{name}.json"
        # A process of the same name that crashed may have left it.
        self._ready_path.unlink(missing_ok=True)
        self._ready: ReadyRecord | None = None
        self._is_asked_to_end = False
        with self.log_path.open("wb") as log:
            self._popen = start_program(module, [*arguments, "--ready-file", str(self._ready_path)], log)

    @property
    def pid(self) -> int:
        """The process id of the program."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; minus the signal's number after a signal; None while the process runs."""
        return self._popen.poll()

    @property
    def ready(self) -> ReadyRecord:
        """Content of the ready file. Raises RuntimeError before the process has become ready."""
        if self._ready is None:
            raise RuntimeError(f"{self.name} has not become ready")
        return self._ready

    def is_ready(self) -> bool:
        """Returns whether the process accepts calls. Raises StartupError with the end of its log if it has ended."""
        if self._ready is None and self._ready_path.exists():
            record = json.loads(self._ready_path.read_text())
            self._ready = ReadyRecord(record["target"], record.get("admin_target"), record["metrics_port"])
        if self._ready is None and self.returncode is not None:
            raise StartupError(f"{self.name} ended with status {self.returncode}:\n{self.log_tail()}")
        return self._ready is not None

    def wait_until_ready(self, deadline_s: float) -> None:
        """Waits for readiness until `deadline_s` on the monotonic clock.

        Raises StartupError if the process ends or is late.
        """
        while not self.is_ready():
            if time.monotonic() > deadline_s:
                raise StartupError(f"{self.name} did not become ready in time:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def log_tail(self, num_lines: int = _TAIL_LINES) -> str:
        """Returns the last lines of the process' log."""
        with self.log_path.open(errors="replace") as log:
            return "".join(deque(log, num_lines)).rstrip() or "(its log is empty)"

    def terminate(self) -> None:
        """Sends SIGTERM, on which the process drains and ends. Sent only once: a second one would end it at once."""
        if self.returncode is None and not self._is_asked_to_end:
            self._is_asked_to_end = True
            self._popen.terminate()

    def stop(self, timeout_s: float) -> int:
        """Ends the process, by SIGKILL after `timeout_s`; returns its exit status."""
        self.terminate()
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()


def start_program(module: str, arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts `python -m module` with its output in `log`. On Linux it gets SIGTERM when the calling thread ends."""
    starter = [sys.executable, "-I", "-S", "-c", _EXEC_SCRIPT, str(os.getpid())]
    # -P keeps the current folder off the import path: it may be a model's folder with Python files.
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(
        [*starter, *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Otherwise Ctrl-C would be its first signal and the parent's SIGTERM its second.
        start_new_session=True,
    )
