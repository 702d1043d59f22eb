"""KernelChoice: the implementation of an operation that a trial has chosen. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NATIVE = "native"
PYTORCH = "pytorch"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The implementation of one operation that a process uses."""

    # For instance "linear bfloat16".
    operation: str
    implementation: str
    # Processor time of one trial in seconds, for each implementation that can run here.
    seconds: Mapping[str, float]

    @property
    def speed_ratio(self) -> float:
        """PyTorch's time divided by the time of the implementation in use."""
        return self.seconds[PYTORCH] / self.seconds[self.implementation]
