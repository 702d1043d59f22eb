"""The engines of PyTorch that move tensors between the ranks of a split model, one for each kind of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# A rank that is late may load its weights from a slow disk. One that has ended is noticed at once.
TIMEOUT = timedelta(minutes=30)


class RankEngine(ABC):
    """An engine, and what it needs of the machine."""

    @abstractmethod
    def connect(self, store: dist.Store, rank: int, size: int, address: str | None) -> Any:
        """Returns PyTorch's engine once all ranks have connected. They do not need the store any more.

        `address` is this machine's at which the others reach it; None: all ranks are on this machine. Raises
        RuntimeError or OSError when another rank has ended.
        """

    @abstractmethod
    def environments(self, num_ranks: int) -> list[Mapping[str, str]]:
        """Returns the variables to set for the processes of ranks 1 to `num_ranks` - 1, which run on this machine.

        Raises ConfigurationError if it has not what so many ranks need.
        """
