"""Processes for work on hostile input: a crash, the memory and the time of such work must not be the service's own.

A process is isolated (-I) and has an empty environment, so that it sees no secret of the service. It finds modules
where the service does, also where only PYTHONPATH tells. limited_side.py is its side: it limits its own memory, and
ends when its sockets are closed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from lookonce.errors import InternalError, UnavailableError
from lookonce.process.exact_receive import receive
from lookonce.process.limited_side import READY

# Does what `python -m MODULE` does, with the folders of the first argument instead of Python's own.
_STARTER = (
    "import os, runpy, sys; sys.path[:], module = sys.argv.pop(1).split(os.pathsep), sys.argv.pop(1); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
_START_TIMEOUT_S = 30.0
# Maximum time between a process's closing of its sockets and its exit.
_END_TIMEOUT_S = 1.0
# Advised pause for a caller when a process got too little processor time, seconds.
RETRY_S = 1.0
# Signals from the kernel's out-of-memory killer or an operator. A crash ends the process by other signals, and one that
# exceeds its memory limit gets a MemoryError.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})


class KilledProcessError(UnavailableError):
    """Somebody outside killed a process while it started."""


class LimitedProcess:
    """A process that has started. Its owner kills it."""

    def __init__(self, purpose: str, module: str, arguments: Sequence[object], num_sockets: int = 1) -> None:
        """Runs a module with SOCKETS and ARGUMENTS, and waits until it is ready. `purpose` names it in errors.

        Raises InternalError if it does not start, UnavailableError if that takes too long, and KilledProcessError if it
        is killed meanwhile.
        """
        self._purpose = purpose
        with ExitStack() as unless_started, ExitStack() as theirs:
            try:
                pairs = [_socket_pair(unless_started, theirs) for _ in range(num_sockets)]
                numbers = [their.fileno() for _, their in pairs]
                sockets = ",".join(map(str, numbers))
                command = [sys.executable, "-I", "-c", _STARTER, _search_path(), module, sockets, *map(str, arguments)]
                self._process = subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL, env={})
            except OSError as error:
                raise self._not_started() from error
            self.sockets = tuple(ours for ours, _ in pairs)
            unless_started.pop_all()
        self._wait_until_ready()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def was_killed_from_outside(self) -> bool:
        """Whether a process that has closed its sockets was killed by somebody else, and did not crash."""
        try:
            return self._process.wait(_END_TIMEOUT_S) in _FROM_OUTSIDE
        except subprocess.TimeoutExpired:
            return False

    def stop(self) -> None:
        """Ends the process. Threads that wait at its sockets are told that it has ended."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the process and closes the sockets. No thread may wait at them."""
        self.stop()
        for connection in self.sockets:
            connection.close()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        try:
            receive(self.sockets[0], len(READY), lambda: _left_until(deadline_s))
        except TimeoutError:
            self.close()
            raise UnavailableError(
                f"the server is too busy: a process that {self._purpose} did not start in time; try again",
                retry_after_s=RETRY_S,
            ) from None
        except (EOFError, OSError) as error:
            was_killed = self.was_killed_from_outside()
            self.close()
            if was_killed:
                raise self.killed_error() from error
            raise self._not_started() from error

    def killed_error(self) -> KilledProcessError:
        """Returns the error for a process that was killed from outside."""
        return KilledProcessError(f"a process that {self._purpose} was killed from outside; try again")

    def _not_started(self) -> InternalError:
        return InternalError(f"a process that {self._purpose} did not start")


def _search_path() -> str:
    """Returns the folders in which this process finds modules, without the current one."""
    return os.pathsep.join(folder for folder in sys.path if os.path.isabs(folder))


def _socket_pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    first, second = socket.socketpair()
    return ours.enter_context(first), theirs.enter_context(second)


def send(connection: socket.socket, data: bytes, wait_s: Callable[[], float]) -> None:
    """Sends all of `data`. Raises the TimeoutError of `wait_s`, which is asked how long to wait each time."""
    view = memoryview(data)
    while view:
        connection.settimeout(wait_s())
        with suppress(TimeoutError):
            view = view[connection.send(view) :]


def _left_until(deadline_s: float) -> float:
    """Returns the time that is left, seconds. Raises TimeoutError when none is."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
