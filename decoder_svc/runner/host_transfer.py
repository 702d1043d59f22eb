"""How a device gets what lies in host memory: numbers of a step at once, embedding rows beside the steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class HostTransfer:
    """The plain way: copies at once, or no copy at all where the device reads host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def move(self, host: Tensor) -> Tensor:
        """The same numbers on the device; work that is given to the device afterwards sees them."""
        return host.to(self.device)

    @contextmanager
    def beside_steps(self) -> Iterator[None]:
        """What is moved and computed inside may happen while steps run, and is complete after `settle`."""
        yield

    def keep_for_steps(self, values: Tensor) -> None:
        """Steps read what was computed inside `beside_steps`: its memory is not used again before they have.

        To be called behind that block, among the steps' own work.
        """

    def settle(self) -> None:
        """Work that is given to the device from now on sees all that was moved beside the steps."""


class PinnedTransfer(HostTransfer):
    """CUDA: through page-locked memory, which the device reads by itself; rows on a stream of their own.

    PyTorch keeps page-locked memory until the copies out of it are done, and uses it again afterwards (CUDA semantics,
    "Use pinned memory buffers").
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._rows_stream = torch.cuda.Stream(device)

    def move(self, host: Tensor) -> Tensor:
        """See HostTransfer; returns before the copy is done."""
        return host.pin_memory().to(self.device, non_blocking=True)

    @contextmanager
    def beside_steps(self) -> Iterator[None]:
        """See HostTransfer."""
        with torch.cuda.stream(self._rows_stream):
            yield

    def keep_for_steps(self, values: Tensor) -> None:
        """See HostTransfer: the allocator would only ask the rows' own stream."""
        values.record_stream(torch.cuda.current_stream(self.device))

    def settle(self) -> None:
        """Steps given to the device from now on wait for the rows; the host does not."""
        torch.cuda.current_stream(self.device).wait_stream(self._rows_stream)
