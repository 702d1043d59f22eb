"""Counts the memory that this process has allocated, to find what a call leaves behind. No garbage collection helps."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
# Time for the last references to go: threads and tasks end a moment after a client has its answer.
_SETTLE_S = 10.0


class _Mallinfo(ctypes.Structure):
    """The structure that glibc's function mallinfo2 returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def allocated_bytes() -> int:
    """Bytes in use from glibc's allocator: large Python objects, protobuf's and gRPC's buffers. Skips without glibc."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        pytest.skip("glibc alone can be asked for memory")
    read.restype = _Mallinfo
    info = read()
    return int(info.uordblks + info.hblkhd)


@contextmanager
def nothing_left(max_bytes: int) -> Iterator[None]:
    """Fails if more than `max_bytes` allocated in the block stay in use. The garbage collector is off meanwhile."""
    gc.collect()
    gc.disable()
    try:
        before = allocated_bytes()
        yield
        until_s = time.monotonic() + _SETTLE_S
        while (left := allocated_bytes() - before) > max_bytes and time.monotonic() < until_s:
            time.sleep(0.02)
        assert left <= max_bytes, f"{left >> 20} MiB are still in use"
    finally:
        gc.enable()
