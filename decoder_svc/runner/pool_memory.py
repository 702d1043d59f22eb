"""Memory of KV pools on the host: zeros whose pages come when they are first written, not when a decoder starts.

A pool takes a large share of a machine, and most of it is not used for a long time after a start. Zeroing it there took
0.3 to 1.8 s per GB (2 × AMD EPYC, a virtual machine, 2026-11-22): twenty seconds for half of a machine of 24 GB.
Huge pages, which would be fewer to fetch, took longer to zero and made no step faster.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def pool_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of that shape; on the host they begin on a page.

    Raises OSError, or PyTorch's error elsewhere, where the system does not give so much even as a promise.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # The tensor keeps the mapping alive.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
