"""How the threads that compute get along with each other, and with everybody else on the machine's processors.

A step's threads meet some two hundred times, and whoever is there first looks out for the others a while before it goes
to sleep. libgomp by itself knows two extremes. Usually it looks out for milliseconds: where encoder, decoder and
clients share processors, a thread then looks out for one that cannot run because it does. But while the process has
more OpenMP threads than the machine has processors, it goes to sleep at once, and waking up takes longer than most
waits. So both are set here: how long threads look out, and that only the thread which runs the model has others beside
it.

On 2 × AMD EPYC, 2026-11-22, small-llava in bfloat16. Steps at batch 1 / 8 / 32 in an engine by itself: 13.3 / 17.5 / 37
ms where a loader's threads were left, 11.3 / 13.9 / 33 ms where not. Sixteen new pictures through encoder and decoder
with two threads each: 0.73 and 0.78 requests a second with libgomp's own patience, 1.12 and 1.25 with this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")

_PATIENCE = "GOMP_SPINCOUNT"
# Looks, of some tens of nanoseconds each.
_LOOKS = "1000"


def limit_patience() -> None:
    """For libgomp, which reads it when it is loaded: before PyTorch is. What the environment says already stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(_PATIENCE, _LOOKS)


def in_passing_thread(work: Callable[[], ResultT]) -> ResultT:
    """What `work` returns or raises, from a thread that is gone then, with the threads beside it.

    For whoever loads and tries a model that another thread will run.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="passing") as thread:
        return thread.submit(work).result()
