"""Work in a thread that ends with it, for work that leaves other threads behind.

OpenMP keeps a team of threads for each thread that has computed in parallel. While all teams together have more threads
than the machine has processors, libgomp lets threads that wait for each other go to sleep at once, instead of looking
out for some microseconds; a decode step has some two hundred such meetings. So whoever loads and tries a model must
not keep a team beside that of the thread that runs it. Steps of small-llava in bfloat16 at batch 1 / 8 / 32, loaded
where the event loop runs and in a thread that ended: 13.3 / 17.5 / 37 ms and 11.3 / 13.9 / 33 ms (2 × AMD EPYC,
2026-11-22).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


def in_passing_thread(work: Callable[[], ResultT]) -> ResultT:
    """What `work` returns or raises; its thread, and the teams that it left, are gone then."""
    with ThreadPoolExecutor(1, thread_name_prefix="passing") as thread:
        return thread.submit(work).result()
