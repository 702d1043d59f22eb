"""Starts the processes of the other ranks of a split model, and notices when one ends."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from decoder_svc.runner.parallel.messages import Loaded, Start, encoded, received
from lookonce.process.bound_process import start_bound_process

logger = logging.getLogger(__name__)

# The other side: it loads its part of the model, so it is a module of the package and not of this room.
_MODULE = "decoder_svc.rank_worker"
# While the model is loaded, a rank may end by a refusal that rank 0 finds as well, and tells better. It gets this time
# for it, seconds.
_REFUSAL_S = 10.0


def end_this_process() -> None:
    """Ends this process at once, as an engine that has died does: its service then ends all requests."""
    logger.error("a rank of the split model has ended; the engine ends with it")
    os._exit(1)


class RankProcesses:
    """The processes of ranks 1 to `size` - 1. The kernel ends them with the thread that started them."""

    def __init__(self, settings: Mapping[str, Any], size: int, on_loss: Callable[[], None] = end_this_process) -> None:
        """Starts the processes with the decoder's settings. `on_loss` is called on a thread when one has ended."""
        # The file at which the ranks meet (RankGroup). It has no name, so nothing is left of it whoever ends first.
        # Each rank opens it anew through the file that it inherits, which has the same number there.
        self._file = os.memfd_create("lookonce-ranks")
        self.meeting_file = pathlib.Path(f"/proc/self/fd/{self._file}")
        self._on_loss = on_loss
        self._is_loaded = False
        self._is_closing = threading.Event()
        self.connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            ours, theirs = Pipe()
            with theirs:
                self._processes.append(
                    start_bound_process(_MODULE, [str(theirs.fileno())], [theirs.fileno(), self._file])
                )
            self.connections.append(ours)
            ours.send_bytes(encoded(Start(dict(settings), rank, size, str(self.meeting_file))))
        self._watchers = [
            threading.Thread(target=self._watch, args=(process,), name="rank-watch", daemon=True)
            for process in self._processes
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    def wait_until_loaded(self) -> None:
        """Waits until each process has its part of the model. Raises EOFError or OSError if one ends before."""
        for connection in self.connections:
            message = received(connection)
            assert isinstance(message, Loaded), "a rank says nothing else"
        self._is_loaded = True

    def close(self) -> None:
        """Ends the processes, whatever they are doing, and waits until they have ended."""
        self._is_closing.set()
        for process in self._processes:
            process.kill()
        for watcher in self._watchers:
            watcher.join()
        for connection in self.connections:
            connection.close()
        os.close(self._file)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._is_closing.wait(0 if self._is_loaded else _REFUSAL_S):
            self._on_loss()
