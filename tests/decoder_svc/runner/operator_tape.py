"""A graph that runs on any device: it repeats the operators that ran during recording, into the same memory.

As in a CUDA graph, only operators on fixed memory remain of a recorded function. Python's decisions and numbers are
those of the recording, and reading a tensor's value on the host during recording raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that must wait for the device, because the host needs their result or its shape.
_ASK_THE_DEVICE = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.item.default,
        torch.ops.aten.nonzero.default,
    }
)


class OperatorTape(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Records the operators that run inside its `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and records one operator."""
        if func in _ASK_THE_DEVICE:
            raise RuntimeError("operation not permitted when stream is capturing")
        output = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, output))
        return output

    def note(self, kernel: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Records a kernel that is not one of PyTorch's operators and returns nothing."""
        self._steps.append((kernel, args, kwargs, None))

    def play(self) -> None:
        """Runs all recorded operators again; results go to the same memory."""
        for func, args, kwargs, output in self._steps:
            again = func(*args, **kwargs)
            # Nearly all operators return one tensor.
            pairs = [(output, again)] if isinstance(output, Tensor) else _pairs(output, again)
            for target, source in pairs:
                if isinstance(target, Tensor) and target.data_ptr() != source.data_ptr():
                    target.copy_(source)


def _pairs(output: Any, again: Any) -> list[tuple[Any, Any]]:
    return list(zip(tree_leaves(output), tree_leaves(again), strict=True))
