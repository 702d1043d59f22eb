"""Activations that a linear layer can compute before it rounds and writes its outputs."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch.nn import functional


class Activation(enum.Enum):
    """A fused activation. Its value is the number that `Activation` in native/activation.h has for it."""

    NONE = 0
    RELU = 1
    SILU = 2
    GELU = 3
    GELU_TANH = 4
    # x σ(1.702 x), as in CLIP.
    GELU_QUICK = 5

    @property
    def function(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The activation as a PyTorch function, elementwise."""
        return _FUNCTIONS[self]


_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.NONE: lambda outputs: outputs,
    Activation.RELU: functional.relu,
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda outputs: functional.gelu(outputs, approximate="tanh"),
    Activation.GELU_QUICK: lambda outputs: outputs * torch.sigmoid(1.702 * outputs),
}
