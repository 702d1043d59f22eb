"""`python -m benchmarks.watched_loop MODULE FILE …`: a service whose event loop notes what each callback takes.

SIGUSR1: notes begin anew. SIGUSR2: they are written to FILE as JSON. The remaining arguments are the service's.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import time
from array import array
from typing import Any

# Longer callbacks are recorded with their names.
_LONG_NS = 1_000_000


class Notes:
    """Nanoseconds of each callback since the notes began."""

    def __init__(self) -> None:
        self._cpu_ns = array("q")
        self._wall_ns = array("q")
        # CPU time of the long ones by the name of what ran.
        self._long_ns: dict[str, list[int]] = {}

    def note(self, callback: object, cpu_ns: int, wall_ns: int) -> None:
        """Records one callback that has run."""
        self._cpu_ns.append(cpu_ns)
        self._wall_ns.append(wall_ns)
        if cpu_ns > _LONG_NS:
            self._long_ns.setdefault(_name(callback), []).append(cpu_ns)

    def write(self, path: pathlib.Path) -> None:
        """All at once, so that whoever waits for the file finds a whole one."""
        record = {"cpu_ns": list(self._cpu_ns), "wall_ns": list(self._wall_ns), "long_ns": self._long_ns}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(record, file)
        os.replace(file.name, path)


def watch(path: pathlib.Path) -> None:
    """Starts recording in this process."""
    notes = Notes()
    # Its callbacks pass through one method of asyncio's, which is no part of its interface.
    handle_class: Any = asyncio.Handle
    run = handle_class._run

    def timed(handle: Any) -> None:
        cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        run(handle)
        notes.note(handle._callback, time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns)

    def begin(*_: object) -> None:
        nonlocal notes
        notes = Notes()

    handle_class._run = timed
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, lambda *_: notes.write(path))


def _name(callback: Any) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        return str(coroutine.__qualname__)
    return str(getattr(callback, "__qualname__", type(callback).__name__))


if __name__ == "__main__":
    module, file = sys.argv[1:3]
    # The service sees its own arguments only.
    del sys.argv[1:3]
    watch(pathlib.Path(file))
    runpy.run_module(module, run_name="__main__")
