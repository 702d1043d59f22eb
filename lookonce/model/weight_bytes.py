"""Counts the memory of a model's weights where the model computes: in its own tensors, or in packed copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of a model's parameters, buffers and packed weights; tensors that share memory count once.

    A module that keeps its weights in structures of its own reports them by a property `nbytes`.
    """
    # By address. Packed tensors of oneDNN have none that PyTorch tells, and are never shared.
    sizes: dict[tuple[str, int], int] = {}
    for module in model.modules():
        sizes["module", id(module)] = int(getattr(module, "nbytes", 0))
        for tensor in _own_tensors(module):
            key = ("tensor", id(tensor)) if tensor.is_mkldnn else ("address", tensor.data_ptr())
            sizes[key] = max(sizes.get(key, 0), int(tensor.nbytes))
    return sum(sizes.values())


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
