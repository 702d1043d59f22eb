"""The first CUDA device that PyTorch sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookonce.devices.base import MIB, Availability, DevicePlatform

if TYPE_CHECKING:
    import torch


def _availability() -> Availability:
    import torch

    if not torch.cuda.is_available():
        return Availability(False, "PyTorch sees no CUDA device here")
    name, number = torch.cuda.get_device_name(torch.cuda.current_device()), torch.cuda.device_count()
    return Availability(True, f"{name}, the first of {number}" if number > 1 else name)


def _torch_device() -> torch.device:
    import torch

    return torch.device("cuda", torch.cuda.current_device())


PLATFORM = DevicePlatform(
    name="cuda",
    runner="decoder_svc.runner.cuda.runner:GPUModelRunner",
    availability=_availability,
    torch_device=_torch_device,
    auto_rank=10,
    prepare_vision="encoder_svc.vision.cuda_tower:make_fast",
    fetch_rows="encoder_svc.vision.cuda_rows:rows_from_cuda",
    # A step of 64 requests takes a GPU some milliseconds, and gRPC needs 0.07 ms of the interpreter for each token.
    engine_process=True,
    # Eight images, as many as a pass takes by default, of any usual size.
    max_forward_bytes=256 * MIB,
)
