"""Large blocks are used again, and freed memory goes back to the system, from whichever thread it comes."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from lookonce.process import heap

_RETURNS = """
import asyncio
from lookonce.process.heap import FreedMemory, resident_bytes

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
from lookonce.process.heap import set_up_heap

def num_page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

set_up_heap()
counts = [num_page_faults()]
for _ in range(2):
    block = b"xy" * (32 << 20)
    del block
    counts.append(num_page_faults())
new, again = counts[1] - counts[0], counts[2] - counts[1]
assert again < new / 10, (new, again)
"""

_SHARES = """
import threading
from lookonce.process.heap import resident_bytes, return_freed_memory, set_up_heap

set_up_heap()
before = resident_bytes()

def work():
    blocks = [b"x" * 100_000 for _ in range(300)]
    grown.wait()
    del blocks

grown = threading.Barrier(9)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
grown.wait()
for thread in threads:
    thread.join()
return_freed_memory()
assert resident_bytes() - before < 40 << 20, (resident_bytes() - before) >> 20
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone can be asked for memory")
def test_a_process_that_grows_no_more_returns_what_it_has_freed() -> None:
    subprocess.run([sys.executable, "-c", _RETURNS], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone can be asked for memory")
def test_large_blocks_are_used_again() -> None:
    """Its second copy of 64 MiB had as many page faults as the first."""
    subprocess.run([sys.executable, "-c", _REUSES], check=True, timeout=60)


def test_an_old_glibc_gets_the_largest_size_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer was not looked at: with a trim threshold alone, all blocks from 128 KiB on were mapped each time."""
    accepted: list[tuple[int, int]] = []

    def mallopt(parameter: ctypes.c_int, value: ctypes.c_int) -> int:
        is_taken = parameter.value != heap._MMAP_THRESHOLD or value.value <= most
        accepted.extend([(parameter.value, value.value)] * is_taken)
        return int(is_taken)

    monkeypatch.setattr(heap, "_glibc_function", lambda _: mallopt)
    most = 32 << 20
    heap.set_up_heap()
    assert accepted == [(heap._ARENA_MAX, 1), (heap._MMAP_THRESHOLD, most), (heap._TRIM_THRESHOLD, 256 << 20)]
    accepted.clear()
    most = 0
    heap.set_up_heap()
    assert accepted == [(heap._ARENA_MAX, 1)]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone can be asked for memory")
def test_memory_that_threads_have_freed_is_returned() -> None:
    """With a heap for each thread, 40 uploads of 30 MiB left 157 MB with an encoder."""
    subprocess.run([sys.executable, "-c", _SHARES], check=True, timeout=60)
