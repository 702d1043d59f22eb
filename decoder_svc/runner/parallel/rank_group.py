"""The processes that compute a model together, on one machine or on several, and the tensors that they exchange.

Each rank has a part of every large weight. PyTorch's distributed engine (gloo) moves the tensors. It listens at one
address of the machine: that of loopback where all ranks are on one, else the one through which the ranks found rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decoder_svc.runner.parallel.rank_sockets import keep_all_alive, listeners, replace_listeners

# A rank that is late may load its weights from a slow disk. One that has ended is noticed at once.
_TIMEOUT = timedelta(minutes=30)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankGroup:
    """This process's place among the ranks.

    All ranks must call the same methods in the same order. Each raises RuntimeError when another rank has ended.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, address: str | None = None) -> None:
        """Waits until all ranks have come. They learn of each other through the store, which leads to the same place.

        `address` is this machine's at which the others reach it; None: all ranks are on this machine.
        """
        self.rank = rank
        self.size = size
        known = listeners()
        # Its options are missing in PyTorch's type hints.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _TIMEOUT
        options._devices = [
            gloo.create_device(interface=_LOOPBACK) if address is None else gloo.create_device(hostname=address)
        ]
        self._store = store
        self._gloo = gloo(store, rank, size, options)
        self._tell_all("met")
        if address is not None:
            keep_all_alive()
        replace_listeners(known)
        self._from_first, self._to_first = dist.BroadcastOptions(), dist.GatherOptions()
        self._from_first.rootRank = self._to_first.rootRank = 0

    def share(self, num_elements: int) -> slice:
        """Returns this rank's part of a dimension. Parts differ by one element at most."""
        return self._share_of(self.rank, num_elements)

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors, the same bits on each rank. `part` may be overwritten.

        Tensors of 16 bits are summed in float32, so that the sum is rounded once.
        """
        total = part.float() if part.dtype.itemsize < torch.float32.itemsize else part.contiguous()
        self._gloo.allreduce([total]).wait()
        return total.to(part.dtype)

    def join(self, part: Tensor, num_elements: int) -> Tensor:
        """Returns `[…, num_elements]` of which each rank has its share of the last dimension."""
        padded = self._padded(part, num_elements)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._gloo.allgather([parts], [padded]).wait()
        return self._joined(parts, num_elements)

    def join_at_first(self, part: Tensor, num_elements: int) -> Tensor:
        """Returns the same on rank 0. The others get a tensor of that shape without values."""
        padded = self._padded(part, num_elements)
        if self.rank:
            self._gloo.gather([], [padded], self._to_first).wait()
            return part.new_zeros((*part.shape[:-1], 1)).expand(*part.shape[:-1], num_elements)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._gloo.gather([parts], [padded], self._to_first).wait()
        return self._joined(parts, num_elements)

    def send_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Copies rank 0's tensors into those of all others."""
        for tensor in tensors:
            # gloo does not know bool.
            data = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
            self._gloo.broadcast([data], self._from_first).wait()

    def _tell_all(self, what: str) -> None:
        """Waits until all ranks have got here."""
        self._store.set(f"{what}/{self.rank}", b"")
        self._store.wait([f"{what}/{rank}" for rank in range(self.size)])

    def _share_of(self, rank: int, num_elements: int) -> slice:
        return slice(num_elements * rank // self.size, num_elements * (rank + 1) // self.size)

    def _padded(self, part: Tensor, num_elements: int) -> Tensor:
        """Returns a share with as many elements as the largest one, because gloo gathers tensors of one shape."""
        largest = -(-num_elements // self.size)
        return torch.nn.functional.pad(part, (0, largest - part.shape[-1])).contiguous()

    def _joined(self, parts: Sequence[Tensor], num_elements: int) -> Tensor:
        shares = [self._share_of(rank, num_elements) for rank in range(self.size)]
        return torch.cat([part[..., : share.stop - share.start] for part, share in zip(parts, shares, strict=True)], -1)
