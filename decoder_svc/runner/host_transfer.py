"""Copies between host memory and the device: a step's numbers in order, embedding rows concurrently with steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Holds a step of 64 sequences with 100 blocks each.
_GATHERED_BYTES = 1 << 16
# Largest size of an element, to which tensors in a buffer are aligned.
_ALIGNMENT = 16


class HostTransfer:
    """Plain synchronous copies; no copy at all if the device reads host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def move(self, host: Tensor) -> Tensor:
        """Returns the same numbers on the device. Work submitted to the device afterwards sees them."""
        return host.to(self.device)

    @contextmanager
    def gathered(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yields a function like `move`. Its results have their numbers only after the block."""
        yield self.move

    def fetch(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts a copy to the host; returns a function that waits for it and returns the numbers."""
        # Also from host memory, which the next step may write to.
        host = values.to("cpu", copy=True)
        return lambda: host

    def staging(self, num_bytes: int) -> Tensor:
        """Returns uninitialised host memory, uint8, from which `copy` copies fastest."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, staged: Tensor, target: Tensor) -> None:
        """Copies `staging` memory to the device. The memory must not be written again."""
        target.copy_(staged)

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
        # Size of the buffer of `gathered`; doubled when a step needs more.
        self._gathered_bytes = _GATHERED_BYTES

    def move(self, host: Tensor) -> Tensor:
        """Begins a copy to the device, and returns the new tensor before the copy is done."""
        return host.pin_memory().to(self.device, non_blocking=True)

    @contextmanager
    def gathered(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yields a function that puts tensors into one page-locked buffer, which is copied once, after the block."""
        gather = _Gather(self, self._gathered_bytes)
        yield gather.move
        gather.finish()
        while self._gathered_bytes < gather.num_bytes:
            self._gathered_bytes *= 2

    def fetch(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts a copy to the host before the values are computed; work submitted later does not delay it."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        is_done = torch.cuda.Event()
        is_done.record(torch.cuda.current_stream(self.device))

        def wait() -> Tensor:
            is_done.synchronize()
            return host

        return wait

    def staging(self, num_bytes: int) -> Tensor:
        """Returns uninitialised page-locked memory, which PyTorch reuses when copies out of it are done."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, staged: Tensor, target: Tensor) -> None:
        """Begins a copy of `staging` memory to the device, and returns before it is done."""
        target.copy_(staged, non_blocking=True)

    @contextmanager
    def overlapping_steps(self) -> Iterator[None]:
        """Runs the block on the rows' own CUDA stream."""
        with torch.cuda.stream(self._rows_stream):
            yield

    def mark_used_by_steps(self, values: Tensor) -> None:
        """Tells the allocator that steps read these values; without it, it would wait for the rows' stream only."""
        values.record_stream(torch.cuda.current_stream(self.device))

    def wait_for_overlapping(self) -> None:
        """Makes the device wait for the rows before it begins later work. The host does not wait."""
        torch.cuda.current_stream(self.device).wait_stream(self._rows_stream)


class _Gather:
    """One buffer on both sides, in which tensors follow each other until they are copied at once."""

    def __init__(self, transfer: HostTransfer, capacity: int) -> None:
        self._transfer = transfer
        self._staged = transfer.staging(capacity)
        self._target = torch.empty(capacity, dtype=torch.uint8, device=transfer.device)
        self._used = 0
        # Bytes that all tensors together would have needed.
        self.num_bytes = 0

    def move(self, host: Tensor) -> Tensor:
        """Returns the tensor's place on the device; a tensor that does not fit is copied alone."""
        num_bytes = -(-host.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes += num_bytes
        if self._used + num_bytes > len(self._staged):
            return self._transfer.move(host)
        place = slice(self._used, self._used + host.nbytes)
        self._staged[place].view(host.dtype).view(host.shape).copy_(host)
        self._used += num_bytes
        return self._target[place].view(host.dtype).view(host.shape)

    def finish(self) -> None:
        """Copies all gathered tensors to the device."""
        if self._used:
            self._transfer.copy(self._staged[: self._used], self._target[: self._used])
