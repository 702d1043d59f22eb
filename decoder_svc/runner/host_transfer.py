"""Copies from host memory to the device: a step's numbers in order, embedding rows concurrently with steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class HostTransfer:
    """Plain synchronous copies; no copy at all if the device reads host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def move(self, host: Tensor) -> Tensor:
        """Returns the same numbers on the device. Work submitted to the device afterwards sees them."""
        return host.to(self.device)

    @contextmanager
    def overlapping_steps(self) -> Iterator[None]:
        """Lets the copies and computations inside run concurrently with steps.

        They are complete for work submitted after `wait_for_overlapping`.
        """
        yield

    def mark_used_by_steps(self, values: Tensor) -> None:
        """Keeps the memory of values computed inside `overlapping_steps` until steps that read them are done.

        Call it after that block, not inside.
        """

    def wait_for_overlapping(self) -> None:
        """Makes work submitted from now on see everything computed inside `overlapping_steps`."""


class PinnedTransfer(HostTransfer):
    """CUDA: asynchronous copies through page-locked memory, embedding rows on a separate stream.

    PyTorch reuses page-locked memory only after the copies out of it are done (CUDA semantics, "Use pinned memory
    buffers").
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._rows_stream = torch.cuda.Stream(device)

    def move(self, host: Tensor) -> Tensor:
        """See HostTransfer. Returns before the copy is done."""
        return host.pin_memory().to(self.device, non_blocking=True)

    @contextmanager
    def overlapping_steps(self) -> Iterator[None]:
        """Runs the block on the rows' own CUDA stream."""
        with torch.cuda.stream(self._rows_stream):
            yield

    def mark_used_by_steps(self, values: Tensor) -> None:
        """See HostTransfer. Without this the allocator would wait for the rows' stream only."""
        values.record_stream(torch.cuda.current_stream(self.device))

    def wait_for_overlapping(self) -> None:
        """See HostTransfer. The device waits for the rows, the host does not."""
        torch.cuda.current_stream(self.device).wait_stream(self._rows_stream)
