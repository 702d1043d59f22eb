"""Numbers that the engine process publishes in shared memory, so that reading them costs the service no message.

Each number is 8 bytes at an address that is a multiple of 8, so it is written at once. Two numbers that are read
together may be of two successive steps, as they may where the engine is a thread.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import time
from dataclasses import astuple, fields
from typing import Self

from decoder_svc.engine.figures import EngineCounters, EngineLoad

# The time at which the current step began, monotonic clock, seconds; NaN while the engine waits for work.
_BEGAN = 0
# The time of the latest sign of life, on the same clock.
_ALIVE = 1
_LOAD = slice(2, 2 + len(fields(EngineLoad)))
_COUNTERS = slice(_LOAD.stop, _LOAD.stop + len(fields(EngineCounters)))
_NUM_BYTES = 8 * _COUNTERS.stop


class FigureBoard:
    """One process's view of the shared numbers. Only the engine process writes them."""

    def __init__(self, fd: int) -> None:
        """`fd` is an open file of `create`; the board does not close it."""
        self._numbers = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("d")

    @classmethod
    def create(cls) -> tuple[int, Self]:
        """Returns the file of a new board, which other processes can open, and a view of it."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("lookonce-engine")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _NUM_BYTES)
        board = cls(fd)
        board.publish_round(None)
        board.publish_life(time.monotonic())
        return fd, board

    def publish_round(self, began_s: float | None) -> None:
        """Publishes when the current step began; None: the engine waits for work."""
        self._numbers[_BEGAN] = math.nan if began_s is None else began_s

    def publish_life(self, now_s: float) -> None:
        """Publishes that the engine process is alive, whether or not it has work."""
        self._numbers[_ALIVE] = now_s

    def publish(self, load: EngineLoad, counters: EngineCounters) -> None:
        """Publishes the load and the sums."""
        for place, figures in ((_LOAD, load), (_COUNTERS, counters)):
            for index, number in enumerate(astuple(figures), place.start):
                self._numbers[index] = number

    @property
    def round_began_s(self) -> float | None:
        """The time at which the current step began, monotonic clock, seconds; None while the engine waits for work."""
        began_s = self._numbers[_BEGAN]
        return None if math.isnan(began_s) else began_s

    @property
    def alive_s(self) -> float:
        """The time of the engine's latest sign of life, monotonic clock, seconds."""
        return self._numbers[_ALIVE]

    def load(self) -> EngineLoad:
        """Returns the load as it was when the current step began."""
        running, waiting, without_rows, usage, rows, step_s = self._numbers[_LOAD]
        return EngineLoad(int(running), int(waiting), int(without_rows), usage, int(rows), step_s)

    def counters(self) -> EngineCounters:
        """Returns the sums as they were when the current step began."""
        return EngineCounters(*(int(number) for number in self._numbers[_COUNTERS]))
