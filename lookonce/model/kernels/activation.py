"""Activations that a linear layer can compute before it rounds and writes its outputs."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch.nn import functional

# Activations are recognised by their values at these points, and at powers of two up to the highest: some modules bound
# their results.
_PROBE_END = 8.0
_NUM_PROBES = 1001
_HIGHEST_POWER = 60
# Relative to the value if that is larger than 1.
_TOLERANCE = 1e-5


class Activation(enum.Enum):
    """A fused activation. Its value is the number that `Activation` in native/activation.h has for it."""

    NONE = 0
    RELU = 1
    SILU = 2
    GELU = 3
    GELU_TANH = 4
    # x σ(1.702 x), as in CLIP.
    GELU_QUICK = 5
    # max(x, 0)² (arXiv:2109.08668).
    RELU_SQUARED = 6

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
    Activation.RELU_SQUARED: lambda outputs: functional.relu(outputs).square(),
}


def activation_of(module: torch.nn.Module) -> Activation | None:
    """Returns the activation that a module without weights computes, recognised by its values."""
    # Models may be constructed on other devices and in other types, which tensors get by default then.
    where = {"device": "cpu", "dtype": torch.float32}
    near = torch.linspace(-_PROBE_END, _PROBE_END, _NUM_PROBES, **where)
    far = 2.0 ** torch.arange(_HIGHEST_POWER + 1, **where)
    probes = torch.cat([near, far, -far])
    values = output_of(module, probes)
    if values is None or values.shape != probes.shape:
        return None
    allowed = _TOLERANCE * values.abs().clamp(min=1)
    known = (one for one in Activation if one is not Activation.NONE)
    # NaN is no result of an activation.
    return next((one for one in known if bool(((one.function(probes) - values).abs() < allowed).all())), None)


def output_of(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor | None:
    """Returns a module's output for one tensor; None when it cannot be called with one tensor."""
    try:
        with torch.inference_mode():
            output = module(rows)
    except (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError):
        return None
    return output if isinstance(output, torch.Tensor) else None
