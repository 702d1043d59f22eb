"""Where a model runs: the device behind the setting's word. Only the services import this module; it needs torch."""

from __future__ import annotations

import torch

from lookonce.errors import ConfigurationError


def chosen_device(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`. Raises ConfigurationError for one that PyTorch does not see."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError("--device: PyTorch sees no CUDA device here; take auto or cpu")
    return torch.device("cuda", torch.cuda.current_device())
