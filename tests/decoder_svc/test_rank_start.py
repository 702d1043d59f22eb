"""Checks before the ranks of a split model are started, and the variables that their processes get."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from decoder_svc import rank_start
from decoder_svc.device_choice import DeviceChoice
from decoder_svc.rank_start import started_ranks
from decoder_svc.runner.parallel import rank_processes
from decoder_svc.settings import DecoderSettings
from lookonce.devices import cpu, cuda
from lookonce.devices.base import DevicePlatform
from lookonce.errors import ConfigurationError
from tests.conftest import DEMO_MODEL
from tests.decoder_svc import gpu_names


class SeenError(Exception):
    """Ends the ranks, as any error of a start does."""


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process see three GPUs."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,3,5")
    monkeypatch.setattr(rank_processes, "_MODULE", gpu_names.__name__)


def settings(**values: Any) -> DecoderSettings:
    return DecoderSettings(**{"model": DEMO_MODEL, "tensor_parallel_size": 2, **values})


def choice(platform: DevicePlatform) -> DeviceChoice:
    return DeviceChoice(platform, "float32", 16, 0.5, engine_process=True)


@pytest.mark.parametrize(
    ("platform", "expected"), [(cuda.PLATFORM, "3"), (cpu.PLATFORM, "7,3,5")], ids=["gpus", "cpus"]
)
def test_a_rank_sees_its_own_gpu(platform: DevicePlatform, expected: str) -> None:
    seen = []
    with contextlib.suppress(SeenError), started_ranks(settings(), choice(platform)) as ranks:
        assert ranks is not None
        seen = [connection.recv_bytes().decode() for connection in ranks.connections]
        raise SeenError
    assert seen == [expected]


def test_more_ranks_than_gpus_are_refused_before_a_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_start, "RankProcesses", None)
    with (
        pytest.raises(ConfigurationError, match="tensor_parallel_size is 4, and each rank needs a GPU of its own"),
        started_ranks(settings(tensor_parallel_size=4), choice(cuda.PLATFORM)),
    ):
        pass


def test_heads_that_cannot_be_divided_are_refused_on_gpus_too() -> None:
    with (
        pytest.raises(ConfigurationError, match="which 3 does not divide"),
        started_ranks(settings(tensor_parallel_size=3), choice(cuda.PLATFORM)),
    ):
        pass
