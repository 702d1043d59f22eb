"""The collector pauses while long-lived objects are made, and freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest

from lookonce.server.garbage import long_lived_objects

# Runs in a process of its own, because frozen objects stay frozen.
_FREEZES = """
import gc
from lookonce.server.garbage import long_lived_objects
frozen = gc.get_freeze_count()
with long_lived_objects():
    assert not gc.isenabled()
    kept = [[] for _ in range(1000)]
assert gc.isenabled() and gc.get_freeze_count() >= frozen + 1000
"""
# Every second piece stays allocated, so that the heap cannot shrink by itself.
_GIVES_BACK = """
import ctypes, gc, psutil
from lookonce.server.garbage import settle
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


_RETURNS = """
import asyncio
from lookonce.server.garbage import FreedMemory, resident_bytes

now_s = 0.0
freed = FreedMemory(lambda: now_s)

async def look(seconds):
    global now_s
    now_s += seconds
    await freed.return_if_due()

# Blocks are below the size from which glibc gives each block back by itself.
blocks = [b"x" * 100_000 for _ in range(3000)]
keeps_the_top = b"y" * 100_000
asyncio.run(look(10))
full = resident_bytes()
asyncio.run(look(10))
assert full - resident_bytes() < 30 << 20, "nothing was free"
del blocks
kept = resident_bytes()
asyncio.run(look(5))
assert kept - resident_bytes() < 30 << 20, "too early"
asyncio.run(look(20))
assert kept - resident_bytes() > 200 << 20
"""

_REUSES = """
import resource
from lookonce.server.garbage import settle

def num_page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

settle()
counts = [num_page_faults()]
for _ in range(2):
    block = b"xy" * (32 << 20)
    del block
    counts.append(num_page_faults())
new, again = counts[1] - counts[0], counts[2] - counts[1]
assert again < new / 10, (new, again)
"""


def test_objects_made_inside_are_kept_from_the_collector() -> None:
    subprocess.run([sys.executable, "-c", _FREEZES], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone can be asked for memory")
def test_settling_returns_freed_memory_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", _GIVES_BACK], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone can be asked for memory")
def test_a_process_that_grows_no_more_returns_what_it_has_freed() -> None:
    subprocess.run([sys.executable, "-c", _RETURNS], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone can be asked for memory")
def test_large_blocks_are_used_again() -> None:
    """Its second copy of 64 MiB had as many page faults as the first."""
    subprocess.run([sys.executable, "-c", _REUSES], check=True, timeout=60)


def test_a_failure_freezes_nothing() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no model"), long_lived_objects():
        raise ValueError("no model")
    assert gc.isenabled()
    # Objects that were frozen before may have been freed meanwhile.
    assert gc.get_freeze_count() <= frozen
