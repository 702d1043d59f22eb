"""The CPUs that a process may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookonce.devices.base import MIB, Availability, DevicePlatform

if TYPE_CHECKING:
    import torch


def _availability() -> Availability:
    import torch

    return Availability(True, f"vector instructions {torch.backends.cpu.get_cpu_capability()}")


def _torch_device() -> torch.device:
    import torch

    return torch.device("cpu")


PLATFORM = DevicePlatform(
    name="cpu",
    runner="decoder_svc.runner.cpu.runner:CPUModelRunner",
    availability=_availability,
    torch_device=_torch_device,
    prepare_vision="encoder_svc.vision.cpu_tower:make_fast",
    auto_rank=0,
    # Larger passes are not faster and delay every image in them. On 2 × AMD EPYC an image of 576 patches (1.7 MiB) took
    # as long alone as in a pass of 8, in both element types, 2026-11-22.
    max_forward_bytes=2 * MIB,
)
