"""Host memory of KV pools, zeroed page by page on first write instead of at start-up.

A pool takes a large share of a machine's memory, and most of it stays unused for a long time. Zeroing it at start-up
took 0.3 to 1.8 s per GB (2 × AMD EPYC, a virtual machine, 2026-11-22): twenty seconds for half of a machine of 24 GB.
Huge pages took longer to zero and made no step faster.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def pool_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros of that shape that start at a page boundary.

    Raises OSError if the system refuses to reserve the memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    # The tensor keeps the mapping alive.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
