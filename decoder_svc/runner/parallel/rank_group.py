"""The processes that compute a model together, on one machine or on several, and the tensors that they exchange.

Each rank has a part of every large weight. An engine of PyTorch moves the tensors (rank_engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from decoder_svc.runner.parallel.rank_engine import RankEngine


class RankGroup:
    """This process's place among the ranks.

    All ranks must call the same methods in the same order. Where tensors are in main memory, each raises RuntimeError
    when another rank has ended. On a device, they are submitted to its current stream.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, engine: RankEngine, address: str | None = None) -> None:
        """Waits until all ranks have come. They learn of each other through the store, which leads to the same place.

        `address` is this machine's at which the others reach it; None: all ranks are on this machine.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._engine = engine.connect(store, rank, size, address)
        self._to_all, self._joining = dist.AllreduceOptions(), distributed_c10d.AllgatherOptions()
        self._from_first, self._to_first = dist.BroadcastOptions(), dist.GatherOptions()
        self._from_first.rootRank = self._to_first.rootRank = 0
        for options in (self._to_all, self._joining, self._from_first, self._to_first):
            # On a device, tensors are moved in the current stream, and not in another one that waits for it.
            options.asyncOp = False

    def share(self, num_elements: int) -> slice:
        """Returns this rank's part of a dimension. Parts differ by one element at most."""
        return self._share_of(self.rank, num_elements)

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors, the same bits on each rank. `part` may be overwritten.

        Tensors of 16 bits are summed in float32, so that the sum is rounded once.
        """
        total = (part.float() if part.dtype.itemsize < torch.float32.itemsize else part).contiguous()
        _wait(self._engine.allreduce([total], self._to_all))
        return total.to(part.dtype)

    def join(self, part: Tensor, num_elements: int) -> Tensor:
        """Returns `[…, num_elements]` of which each rank has its share of the last dimension."""
        padded = self._padded(part, num_elements)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        _wait(self._engine.allgather([parts], [padded], self._joining))
        return self._joined(parts, num_elements)

    def join_at_first(self, part: Tensor, num_elements: int) -> Tensor:
        """Returns the same on rank 0. The others get a tensor of that shape without values."""
        padded = self._padded(part, num_elements)
        if self.rank:
            _wait(self._engine.gather([], [padded], self._to_first))
            return part.new_zeros((*part.shape[:-1], 1)).expand(*part.shape[:-1], num_elements)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        _wait(self._engine.gather([parts], [padded], self._to_first))
        return self._joined(parts, num_elements)

    def send_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Copies rank 0's tensors into those of all others."""
        for tensor in tensors:
            # The engines do not know bool.
            data = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
            _wait(self._engine.broadcast([data], self._from_first))

    def _share_of(self, rank: int, num_elements: int) -> slice:
        return slice(num_elements * rank // self.size, num_elements * (rank + 1) // self.size)

    def _padded(self, part: Tensor, num_elements: int) -> Tensor:
        """Returns a share with as many elements as the largest one, because engines gather tensors of one shape."""
        largest = -(-num_elements // self.size)
        return torch.nn.functional.pad(part, (0, largest - part.shape[-1])).contiguous()

    def _joined(self, parts: Sequence[Tensor], num_elements: int) -> Tensor:
        shares = [self._share_of(rank, num_elements) for rank in range(self.size)]
        return torch.cat([part[..., : share.stop - share.start] for part, share in zip(parts, shares, strict=True)], -1)


def _wait(work: Any) -> None:
    """Waits until tensors in main memory are there. NCCL has nothing to wait for: what is submitted next waits."""
    if work is not None:
        work.wait()
