"""Starts the processes of the other ranks of a split model on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from lookonce.process.bound_process import start_bound_process

# The other side: it loads its part of the model, so it is a module of the package and not of this room.
_MODULE = "decoder_svc.rank_worker"


class RankProcesses:
    """One process for each other rank. The kernel ends them with the thread that started them."""

    def __init__(self, environments: Sequence[Mapping[str, str]], arguments: Sequence[str]) -> None:
        """Starts a process for each environment, which is added to that of this process.

        The arguments follow the number of the connection's file.
        """
        self.connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for environment in environments:
            ours, theirs = Pipe()
            with theirs:
                file = theirs.fileno()
                self._processes.append(start_bound_process(_MODULE, [str(file), *arguments], [file], environment))
            self.connections.append(ours)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the processes, whatever they are doing, and waits until they have ended."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
