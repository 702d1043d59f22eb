"""The heap of a service's process: how glibc allocates, and when it returns freed memory to the system."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

_STATM = pathlib.Path("/proc/self/statm")
# Growth of the process for which freed memory is looked for.
_LEAST_BYTES = 128 << 20
# Growth between two looks up to which the process counts as no longer growing.
_STEADY_BYTES = 16 << 20
# Seconds between two searches. A search that finds nothing doubles them: the memory may be in use.
_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 600.0
# glibc's parameters (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Blocks, and free memory, of up to this size stay with the process.
_KEPT_BYTES = 256 << 20
# The largest mmap threshold of glibc up to 2.34: half of a thread's heap (malloc.c, do_set_mmap_threshold).
_OLD_MOST_BYTES = 32 << 20


def set_up_heap() -> None:
    """Makes glibc use one heap, and keep large freed blocks in it. Call it before there is a second thread.

    * Large blocks are used again. glibc would return all of more than 32 MiB to the system, and to receive a large
      message takes four copies of it under Python's lock. In new memory most of their time goes to page faults: a copy
      of 60 MiB takes 36 ms there and 7 ms in memory that was used before.
    * Threads share one heap. glibc would give them up to eight for each processor, and never returns the free memory at
      the end of those: after 40 uploads of 30 MiB an encoder had 157 MB more than before them, and now 1 MB.

    Both 2 x AMD EPYC, 2026-11-23. `FreedMemory` returns what is not used again.
    """
    if (mallopt := _glibc_function("mallopt")) is None:
        return

    def accepts(parameter: int, value: int) -> bool:
        return bool(mallopt(ctypes.c_int(parameter), ctypes.c_int(value)))

    accepts(_ARENA_MAX, 1)
    # The trim threshold alone would be worse than nothing: it ends the adjustment by which glibc comes to use freed
    # blocks again. Copies of 4 MiB then took 2.4 ms instead of 0.12 ms each.
    if accepts(_MMAP_THRESHOLD, _KEPT_BYTES) or accepts(_MMAP_THRESHOLD, _OLD_MOST_BYTES):
        accepts(_TRIM_THRESHOLD, _KEPT_BYTES)


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
            await asyncio.to_thread(return_freed_memory)
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


def return_freed_memory() -> None:
    """Asks glibc to return freed memory to the system; does nothing with another C library."""
    if (trim := _glibc_function("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


def _glibc_function(name: str) -> Any:
    """Returns a function that other C libraries do not have, or None."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
