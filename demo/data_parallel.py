"""Data-parallel training on CPU cores: one single-threaded process per core, gradients averaged after every step.

On a shared machine this is far steadier than two threads in one process, which wait for each other in each operation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn


class Workers:
    """One worker's view of the group. It can be pickled, to be passed to a new process."""

    def __init__(self, rank: int, num_workers: int, gradients: Tensor, barrier: Barrier) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self._gradients = gradients
        self._barrier = barrier

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one that logs and saves."""
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces each gradient by its mean over all workers, so that all workers have the same gradients."""
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([parameter.grad.flatten() for parameter in trained])
        self._gradients[self.rank, : len(flat)] = flat
        self._barrier.wait()
        mean = self._gradients[:, : len(flat)].mean(dim=0)
        # No worker may write the next step's gradients before all have read these.
        self._barrier.wait()
        for parameter, values in zip(trained, mean.split([each.numel() for each in trained]), strict=True):
            parameter.grad = values.view_as(parameter)


def run_workers(job: Callable[..., None], num_workers: int, max_parameters: int, *arguments: Any) -> None:
    """Runs `job(workers, *arguments)` in `num_workers` processes and waits. Raises if one of them fails."""
    context = multiprocessing.get_context("spawn")
    gradients = torch.zeros(num_workers, max_parameters).share_memory_()
    barrier = context.Barrier(num_workers)
    multiprocessing.spawn(_run_one, (job, num_workers, gradients, barrier, arguments), nprocs=num_workers)


def _run_one(
    rank: int,
    job: Callable[..., None],
    num_workers: int,
    gradients: Tensor,
    barrier: Barrier,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    job(Workers(rank, num_workers, gradients, barrier), *arguments)
