"""The collector pauses while long-lived objects are made, and freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest

from lookonce.process.garbage import long_lived_objects

# Runs in a process of its own, because frozen objects stay frozen.
_FREEZES = """
import gc
from lookonce.process.garbage import long_lived_objects
frozen = gc.get_freeze_count()
with long_lived_objects():
    assert not gc.isenabled()
    kept = [[] for _ in range(1000)]
assert gc.isenabled() and gc.get_freeze_count() >= frozen + 1000
"""
# Every second piece stays allocated, so that the heap cannot shrink by itself.
_GIVES_BACK = """
import ctypes, gc, psutil
from lookonce.process.garbage import settle
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
pieces = [library.malloc(ctypes.c_size_t(65536)) for _ in range(2000)]
for piece in pieces:
    ctypes.memset(piece, 1, 65536)
for piece in pieces[::2]:
    library.free(ctypes.c_void_p(piece))
before = psutil.Process().memory_info().rss
ring = []
ring.append(ring)
frozen = gc.get_freeze_count()
settle()
assert before - psutil.Process().memory_info().rss > 30 << 20
assert gc.get_freeze_count() > frozen
"""


def test_objects_made_inside_are_kept_from_the_collector() -> None:
    subprocess.run([sys.executable, "-c", _FREEZES], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone can be asked for memory")
def test_settling_returns_freed_memory_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", _GIVES_BACK], check=True, timeout=60)


def test_a_failure_freezes_nothing() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no model"), long_lived_objects():
        raise ValueError("no model")
    assert gc.isenabled()
    # Objects that were frozen before may have been freed meanwhile.
    assert gc.get_freeze_count() <= frozen
