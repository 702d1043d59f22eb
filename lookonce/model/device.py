"""Turns the `--device` setting into a PyTorch device. Needs torch, so only the services import this module."""

from __future__ import annotations

import torch

from lookonce.errors import ConfigurationError


def chosen_device(name: str) -> torch.device:
    """Returns the device for `auto`, `cpu` or `cuda`. Raises ConfigurationError if PyTorch sees no CUDA device."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError("--device: PyTorch sees no CUDA device here; use auto or cpu")
    return torch.device("cuda", torch.cuda.current_device())
