"""Moves tensors between GPUs: NCCL, of which each rank uses one.

PyTorch's engine works in the order of a stream. A collective is submitted to the current stream, like a kernel, and the
host goes on; so tensors need no protection beyond that of the allocator. Nothing here waits for another rank but
`connect`. If a rank ends, the kernels of the others wait on their GPUs for ever, and their processes are ended from
outside: by the thread that watches the connections (OtherRanks), by the kernel (RankProcesses), or by the thread that
watches rank 0 (remote_rank.py). A process that ends takes its kernels along.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from decoder_svc.runner.parallel.rank_engine import TIMEOUT, RankEngine
from lookonce.errors import ConfigurationError

# The GPUs that a process sees, by numbers or by names.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SETTINGS = {
    # Otherwise a thread of PyTorch asks the store every second whether another rank wants it to write a report, for
    # as long as the process runs. Ranks do not answer each other any more once they have met.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # For such reports, PyTorch would also note the Python stack of each collective.
    "TORCH_FR_BUFFER_SIZE": "0",
    # After an error in the network between GPUs, PyTorch waits four times as long for reports that nobody writes, and
    # then ends the process. Milliseconds.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
    # NCCL would answer questions about its state at a port.
    "NCCL_RAS_ENABLE": "0",
}
# Ranks of one machine meet on its loopback interface. Otherwise NCCL listens at an address of the network.
_LOOPBACK = {"NCCL_SOCKET_IFNAME": "=lo"}

# The engines of this process, which live as long as it does. One that is destroyed waits for all that was submitted,
# also if another rank has ended.
_engines: list[Any] = []


class NcclEngine(RankEngine):
    """NCCL, for ranks on GPUs."""

    def connect(self, store: dist.Store, rank: int, size: int, address: str | None) -> Any:
        """Implements RankEngine.connect. Settings of NCCL that the environment has are kept."""
        for name, value in {**_SETTINGS, **({} if address else _LOOPBACK)}.items():
            os.environ.setdefault(name, value)
        # It is missing in builds of PyTorch without NCCL.
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = TIMEOUT
        engine = nccl(store, rank, size, options)
        _engines.append(engine)
        device = torch.device("cuda", 0)
        # The ranks connect in their first collective, for which rank 0 puts the address of NCCL into the store.
        engine.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
        return engine

    def environments(self, num_ranks: int) -> list[Mapping[str, str]]:
        """Implements RankEngine.environments. Each rank sees one of the GPUs that this process sees.

        Rank 0 is this process and uses the first one, as with a whole model.
        """
        if not dist.is_nccl_available():
            raise ConfigurationError(
                "tensor_parallel_size needs NCCL on GPUs, which this build of PyTorch does not have; install one of "
                "its CUDA builds for Linux"
            )
        num_devices = torch.cuda.device_count()
        if num_devices < num_ranks:
            raise ConfigurationError(
                f"tensor_parallel_size is {num_ranks}, and each rank needs a GPU of its own; the decoder sees "
                f"{num_devices}: set it lower, give the decoder more GPUs ({_VISIBLE}), or let ranks run on other "
                "machines (rank_listen)"
            )
        visible = os.environ.get(_VISIBLE)
        names = [str(number) for number in range(num_devices)] if visible is None else visible.split(",")
        return [{_VISIBLE: name.strip()} for name in names[1:num_ranks]]
