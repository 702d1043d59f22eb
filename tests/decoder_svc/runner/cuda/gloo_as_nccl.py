"""A stand-in for PyTorch's NCCL engine between simulated devices. No NCCL runs without GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from decoder_svc.runner.parallel.gloo_engine import GlooEngine
from tests.decoder_svc.runner.cuda.simulated_device import DeviceTensor


class GlooAsNccl:
    """Replaces `ProcessGroupNCCL`: gloo moves the contents of the device's tensors.

    Like NCCL, it connects the ranks in their first collective, refuses tensors that are not on the device or have gaps,
    and returns nothing for what it submits to the current stream.
    """

    class Options:
        """The options of an engine, of which PyTorch's gloo reads the same one."""

        _timeout: Any = None

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        assert options._timeout is not None
        self._arguments = store, rank, size
        self._gloo: Any = None

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        """Sums a tensor in place."""
        return self._submit("allreduce", [_contents(tensors)], options or dist.AllreduceOptions())

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        """Copies rank 0's tensor into those of the others."""
        return self._submit("broadcast", [_contents(tensors)], options)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any) -> Any:
        """Copies each rank's tensor to all."""
        return self._submit("allgather", [[_contents(each) for each in outputs], _contents(inputs)], options)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any) -> Any:
        """Copies each rank's tensor to rank 0."""
        return self._submit("gather", [[_contents(each) for each in outputs], _contents(inputs)], options)

    def _submit(self, name: str, arguments: list[Any], options: Any) -> Any:
        with _disable_current_modes():
            if self._gloo is None:
                self._gloo = GlooEngine().connect(*self._arguments, None)
            work = getattr(self._gloo, name)(*arguments, options)
            work.wait()
        return work if options.asyncOp else None


def _contents(tensors: Sequence[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor):
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.content.is_contiguous():
            raise ValueError("Tensors must be contiguous")
    return [tensor.content for tensor in tensors if isinstance(tensor, DeviceTensor)]


@contextlib.contextmanager
def nccl_installed() -> Iterator[None]:
    """Replaces NCCL inside the block, and forgets the settings that it gets in the environment."""
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "ProcessGroupNCCL", GlooAsNccl, raising=False)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a device")
        yield
