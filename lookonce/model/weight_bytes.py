"""Counts the memory of a model's weights on any device: its own tensors, and packed copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of a model's parameters, buffers and packed weights. A tensor of several modules counts once.

    A module that keeps its weights in structures of its own reports them by a property `nbytes`.
    """
    modules = list(model.modules())
    # By identity: tied weights are one tensor, and addresses exist on some devices only.
    tensors = {id(tensor): tensor for module in modules for tensor in _own_tensors(module)}
    num_packed = sum(int(getattr(module, "nbytes", 0)) for module in modules)
    return num_packed + sum(int(tensor.nbytes) for tensor in tensors.values())


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
