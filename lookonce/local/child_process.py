"""A process of ours that ends with its parent, says in a file when it is ready, and logs to a file.

Knows nothing of what the process does.
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

from lookonce.errors import StartupError

_POLL_S = 0.05
_TAIL_LINES = 20
# Runs between fork and the program: asks the kernel to end it when the parent goes, and closes the gap in which the
# parent has gone already. A `preexec_fn` could do it too, but may deadlock beside gRPC's threads.
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
    """What a service writes into its ready file."""

    # host:port of the gRPC server.
    target: str
    # Where operators' calls are served; None: nowhere.
    admin_target: str | None
    # Port of the Prometheus endpoint, None without one.
    metrics_port: int | None


class ChildProcess:
    """One `python -m module` process.

    On Linux it gets SIGTERM when the *thread* that started it ends, so start it from the main thread or from one that
    lives on; elsewhere it ends with `stop` only. Ctrl-C in a terminal does not reach it.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], directory: pathlib.Path) -> None:
        """Starts the process; its ready file and log are `directory/name.json` and `directory/name.log`."""
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._ready_path = directory / f"{name}.json"
        # Of a process of the same name that did not end in order.
        self._ready_path.unlink(missing_ok=True)
        self._ready: ReadyRecord | None = None
        starter = [sys.executable, "-I", "-S", "-c", _EXEC_SCRIPT, str(os.getpid())]
        # Without the current folder among those that modules come from: it may be a model's.
        command = [sys.executable, "-P", "-m", module, *arguments, "--ready-file", str(self._ready_path)]
        self._is_asked_to_end = False
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                [*starter, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Else Ctrl-C would be its first signal and the parent's SIGTERM its second.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, minus the signal's number after a signal, None while it runs."""
        return self._popen.poll()

    @property
    def ready(self) -> ReadyRecord:
        """What it said when it became ready. Raises RuntimeError before `wait_until_ready`."""
        if self._ready is None:
            raise RuntimeError(f"{self.name} has not become ready")
        return self._ready

    def is_ready(self) -> bool:
        """Whether it accepts calls. Raises StartupError with the end of its log when it has ended."""
        if self._ready is None and self._ready_path.exists():
            record = json.loads(self._ready_path.read_text())
            self._ready = ReadyRecord(record["target"], record["admin_target"], record["metrics_port"])
        if self._ready is None and self.returncode is not None:
            raise StartupError(f"{self.name} ended with status {self.returncode}:\n{self.log_tail()}")
        return self._ready is not None

    def wait_until_ready(self, deadline_s: float) -> None:
        """Waits until the monotonic clock says `deadline_s`. Raises StartupError when it ends or is not ready then."""
        while not self.is_ready():
            if time.monotonic() > deadline_s:
                raise StartupError(f"{self.name} did not become ready in time:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def log_tail(self, num_lines: int = _TAIL_LINES) -> str:
        """The last lines of its log."""
        with self.log_path.open(errors="replace") as log:
            return "".join(deque(log, num_lines)).rstrip() or "(its log is empty)"

    def terminate(self) -> None:
        """Asks it to drain and end, once: a second signal would end it on the spot."""
        if self.returncode is None and not self._is_asked_to_end:
            self._is_asked_to_end = True
            self._popen.terminate()

    def stop(self, timeout_s: float) -> int:
        """Ends it, by force after `timeout_s`; returns its exit status."""
        self.terminate()
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()
