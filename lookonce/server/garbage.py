"""Garbage collection while a process starts, and the return of freed memory. Knows no service."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_STATM = pathlib.Path("/proc/self/statm")
# Growth of the process for which freed memory is looked for.
_LEAST_BYTES = 128 << 20
# Growth between two looks up to which the process counts as no longer growing.
_STEADY_BYTES = 16 << 20
# Seconds between two searches. A search that finds nothing doubles them: the memory may be in use.
_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 600.0
# glibc's parameters (malloc.h), and their value here: blocks and free memory of this size stay with the process.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 256 << 20


@contextlib.contextmanager
def long_lived_objects() -> Iterator[None]:
    """Pauses the garbage collector in the block, and excludes all objects made there from later collections.

    Importing torch and transformers makes a million objects. Collecting among them took a fifth of the imports' time
    (0.9 of 4.7 s of CPU time, AMD EPYC, 2026-11-22), and would later pause the process in the middle of answers. After
    an exception nothing is excluded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def settle() -> None:
    """Frees the memory that loading needed, and excludes all remaining objects from later collections.

    Call it once everything is loaded. glibc keeps most of the freed memory unless it is asked to return it to the
    system: a decoder of small-llava then holds 110 MB less. Without the exclusion, 64 streams of the demo model got a
    tenth fewer tokens per second (both 2 × AMD EPYC, 2026-11-22).

    From then on, freed blocks of up to 256 MiB are used again, and `FreedMemory` returns those that are not.
    """
    gc.collect()
    _trim()
    _reuse_large_blocks()
    gc.freeze()


class FreedMemory:
    """Returns freed memory to the system while a process serves.

    glibc keeps what was freed, and after large requests that is much: of 1370 MB that an encoder had after 30 calls of
    60 MiB, 754 were free. A search takes 0.1 to 0.3 s, in which other threads may wait for memory, so there is none
    while the process grows (2 x AMD EPYC, 2026-11-23).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins with the memory that the process has now."""
        self._clock = clock
        # Memory at the beginning, at the last look, and after the last search.
        self._first = self._seen = self._last = resident_bytes()
        self._pause_s = _PAUSE_S
        self._due_s = clock() + _PAUSE_S

    async def return_if_due(self) -> None:
        """Looks for freed memory if the process has grown, grows no more, and the last search is long enough ago."""
        if self._clock() < self._due_s:
            return
        seen, self._seen = self._seen, resident_bytes()
        if self._seen > self._last + _LEAST_BYTES:
            self._pause_s = _PAUSE_S
        if self._first + _LEAST_BYTES < self._seen <= seen + _STEADY_BYTES:
            await asyncio.to_thread(_trim)
            self._last = resident_bytes()
            found_much = self._seen - self._last > _LEAST_BYTES // 2
            self._pause_s = _PAUSE_S if found_much else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._seen = self._last
        self._due_s = self._clock() + self._pause_s


def resident_bytes() -> int:
    """Returns the memory of this process that is in RAM; 0 where the system does not tell it in /proc."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _trim() -> None:
    """Asks glibc to return freed memory to the system; does nothing with another C library."""
    if (trim := _glibc_function("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


def _reuse_large_blocks() -> None:
    """Makes glibc keep freed blocks that it would return to the system, which is all of more than 32 MiB.

    To receive a large message takes four copies of it under Python's lock. In new memory most of their time goes to
    page faults: a copy of 60 MiB takes 36 ms there and 7 ms in memory that was used before (2 x AMD EPYC, 2026-11-23).
    """
    if (mallopt := _glibc_function("mallopt")) is not None:
        for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(ctypes.c_int(parameter), ctypes.c_int(_KEPT_BYTES))


def _glibc_function(name: str) -> Any:
    """Returns a function that other C libraries do not have, or None."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
