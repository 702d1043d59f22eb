"""Moves rows from a CUDA device to main memory through page-locked memory; does the same as `rows_on_host`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from encoder_svc.vision.row_transfer import NotFiniteError


def rows_from_cuda(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors `[num_rows, width]` of one device and type, each to contiguous main memory of its own.

    Values are tested on the device, and the host waits once. Raises NotFiniteError if a value is not finite.
    """
    joined = torch.cat(list(outputs))
    rows = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    rows.copy_(joined, non_blocking=True)
    is_finite = torch.empty((), dtype=torch.bool, pin_memory=True)
    is_finite.copy_(joined.isfinite().all(), non_blocking=True)
    is_done = torch.cuda.Event()
    is_done.record(torch.cuda.current_stream(joined.device))
    is_done.synchronize()
    if not bool(is_finite):
        raise NotFiniteError
    # Page-locked memory is scarce and shared by all images, so kept rows must not hold it.
    return [part.clone() for part in rows.split([len(each) for each in outputs])]
