"""The facts about the device `fixed`, which is PyTorch on CPUs with fixed numbers of tokens per step."""

import torch

from lookonce.devices.base import Availability, DevicePlatform

PLATFORM = DevicePlatform(
    name="fixed",
    runner="fixed_steps.runner:FixedStepsRunner",
    availability=lambda: Availability(True, f"PyTorch {torch.__version__}"),
    torch_device=lambda: torch.device("cpu"),
    block_size=8,
    block_size_multiple=8,
)
