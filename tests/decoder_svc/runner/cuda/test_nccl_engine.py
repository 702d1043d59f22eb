"""NCCL between GPUs: its settings, when the ranks connect, and which GPU each rank of a machine sees."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from decoder_svc.runner.cuda import nccl_engine
from decoder_svc.runner.cuda.nccl_engine import NcclEngine
from decoder_svc.runner.parallel.rank_engine import TIMEOUT
from lookonce.errors import ConfigurationError
from tests.decoder_svc.runner.cuda.fake_cuda import installed
from tests.decoder_svc.runner.cuda.simulated_device import CUDA


class NotedEngine:
    """Notes what is done with PyTorch's engine, and the environment in which it is made."""

    made: tuple[Any, ...] = ()
    environment: dict[str, str]
    summed: torch.Tensor
    has_waited = False

    class Options:
        _timeout: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.made = arguments
        self.environment = dict(os.environ)

    def allreduce(self, tensors: list[torch.Tensor]) -> NotedEngine:
        (self.summed,) = tensors
        return self

    def wait(self) -> None:
        self.has_waited = True


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nccl_engine, "_engines", [])
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NotedEngine, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if "NCCL" in name or name == "CUDA_VISIBLE_DEVICES"]:
            del os.environ[name]
        yield


def connected(address: str | None) -> NotedEngine:
    with installed():
        engine: NotedEngine = NcclEngine().connect(dist.HashStore(), 1, 2, address)
    return engine


def test_ranks_connect_before_they_leave_the_store() -> None:
    engine = connected(None)
    _, rank, size, options = engine.made
    assert (rank, size, options._timeout) == (1, 2, TIMEOUT)
    assert engine.summed.device == CUDA
    assert engine.has_waited


def test_an_engine_is_not_destroyed_before_its_process_ends() -> None:
    """It would wait for collectives whose other ranks may have ended."""
    engine = weakref.ref(connected(None))
    gc.collect()
    assert engine() is not None


def test_no_thread_asks_the_store_later_and_nobody_can_ask_for_reports() -> None:
    environment = connected(None).environment
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert environment["TORCH_FR_BUFFER_SIZE"] == "0"
    assert environment["NCCL_RAS_ENABLE"] == "0"


@pytest.mark.parametrize(("address", "interface"), [(None, "=lo"), ("10.0.0.1", None)])
def test_ranks_of_one_machine_meet_on_loopback(address: str | None, interface: str | None) -> None:
    assert connected(address).environment.get("NCCL_SOCKET_IFNAME") == interface


def test_settings_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"NCCL_SOCKET_IFNAME": "eth7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert own.items() <= connected(None).environment.items()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["1", "2"]),
        ("4,6,7,5", ["6", "7"]),
        ("GPU-8932f937, GPU-46d9a1c2, GPU-7f3a", ["GPU-46d9a1c2", "GPU-7f3a"]),
    ],
)
def test_each_rank_sees_the_gpu_with_its_number(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is the process that starts the others, and uses the first one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 if visible is None else len(visible.split(",")))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert NcclEngine().environments(3) == [{"CUDA_VISIBLE_DEVICES": name} for name in expected]


def test_fewer_gpus_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_size is 4, and .* the decoder sees 2: set it lower"):
        NcclEngine().environments(4)
    assert NcclEngine().environments(1) == [], "the others are on other machines"


def test_a_build_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigurationError, match="needs NCCL on GPUs, which this build of PyTorch does not have"):
        NcclEngine().environments(1)
