"""A graph that runs anywhere: the operators that ran while it was recorded, run again into the same memory.

As of a CUDA graph, all that is left of a recorded function are operators on fixed memory: Python's decisions and
numbers are those of the recording, and asking a tensor for a number while recording raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their results, or the shapes of those, are known to the host only when the device has come so far.
_ASK_THE_DEVICE = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.item.default,
        torch.ops.aten.nonzero.default,
    }
)


class OperatorTape(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Records inside its `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator and notes it."""
        if func in _ASK_THE_DEVICE:
            raise RuntimeError("operation not permitted when stream is capturing")
        output = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, output))
        return output

    def play(self) -> None:
        """Runs all again; results go where they were."""
        for func, args, kwargs, output in self._steps:
            again = func(*args, **kwargs)
            for target, source in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(target, Tensor) and target.data_ptr() != source.data_ptr():
                    target.copy_(source)
