"""Moves rows from the device of a forward pass to main memory, and finds values that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# By element size in bytes: signed and unsigned integers of that size.
_INTEGERS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


def rows_on_host(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors `[num_rows, width]` of one device and type, each to contiguous main memory of its own.

    Raises ValueError if a value is not finite.
    """
    if outputs[0].device.type == "cuda":
        copies, is_finite = _copies_from_cuda(outputs)
    else:
        copies = [rows.to("cpu", copy=True) for rows in outputs]
        is_finite = all(is_all_finite(rows) for rows in copies)
    if not is_finite:
        raise ValueError("rows hold values that are not finite")
    return copies


def is_all_finite(rows: Tensor) -> bool:
    """Whether a contiguous tensor in main memory has neither infinities nor NaN.

    Compares bits as integers: 0.04 ms for a million values of bfloat16, of which `torch.isfinite` makes three tensors
    in 2 ms to 40 ms (two cores, November 2026).
    """
    signed_type, unsigned_type = _INTEGERS[rows.element_size()]
    # Infinities and NaN have the highest exponents. Their bits are the largest positive integers, and with a sign the
    # largest unsigned ones.
    infinities = torch.tensor([torch.inf, -torch.inf], dtype=rows.dtype).view(signed_type).numpy()
    signed = rows.view(signed_type).numpy()
    is_positive_finite = signed.max() < infinities[0]
    return bool(is_positive_finite and signed.view(unsigned_type).max() < infinities.view(unsigned_type)[1])


def _copies_from_cuda(outputs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Returns copies and whether all values are finite. Values are tested on the device, and the host waits once."""
    joined = torch.cat(list(outputs))
    rows = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    rows.copy_(joined, non_blocking=True)
    is_finite = torch.empty((), dtype=torch.bool, pin_memory=True)
    is_finite.copy_(joined.isfinite().all(), non_blocking=True)
    is_done = torch.cuda.Event()
    is_done.record(torch.cuda.current_stream(joined.device))
    is_done.synchronize()
    # Page-locked memory is scarce and shared by all images, so kept rows must not hold it.
    return [part.clone() for part in rows.split([len(each) for each in outputs])], bool(is_finite)
