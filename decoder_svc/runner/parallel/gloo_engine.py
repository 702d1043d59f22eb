"""Moves tensors in main memory between ranks: gloo, over TCP.

gloo listens at one address of the machine: that of loopback where all ranks are on one, else the one through which the
ranks found rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from decoder_svc.runner.parallel.rank_engine import TIMEOUT, RankEngine
from decoder_svc.runner.parallel.rank_sockets import keep_all_alive, listeners, replace_listeners

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class GlooEngine(RankEngine):
    """gloo, for ranks on CPUs."""

    def connect(self, store: dist.Store, rank: int, size: int, address: str | None) -> Any:
        """Implements RankEngine.connect. Nobody can connect to the ranks afterwards."""
        known = listeners()
        # Its options are missing in PyTorch's type hints.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = TIMEOUT
        options._devices = [
            gloo.create_device(interface=_LOOPBACK) if address is None else gloo.create_device(hostname=address)
        ]
        engine = gloo(store, rank, size, options)
        # A rank that closes its listener before all have connected would keep the others out.
        store.set(f"met/{rank}", b"")
        store.wait([f"met/{each}" for each in range(size)])
        if address is not None:
            keep_all_alive()
        replace_listeners(known)
        return engine

    def environments(self, num_ranks: int) -> list[Mapping[str, str]]:
        """Implements RankEngine.environments. Ranks share the CPUs."""
        return [{}] * (num_ranks - 1)
