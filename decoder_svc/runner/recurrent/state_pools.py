"""The states of recurrent layers: one per running request, and the snapshots of the prefix cache.

The scheduler decides which state a chunk begins with and where it is copied to (state_group.py). No two sequences of a
step write the same state, and none writes a snapshot that another one reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.scheduling.scheduler_output import StateUse


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shapes of one layer's state."""

    # The recurrent matrix, [heads, key_dim, value_dim], float32.
    matrix: tuple[int, int, int]
    # The last inputs of the short convolution, [channels, kernel_size - 1].
    window: tuple[int, int]
    # Element type of the inputs.
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one state of one layer."""
        return math.prod(self.matrix) * 4 + math.prod(self.window) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of several sequences in one layer."""

    # [num_sequences, heads, key_dim, value_dim], float32.
    matrices: Tensor
    # [num_sequences, channels, kernel_size - 1].
    windows: Tensor


class StatePool:
    """The states of one layer: first those of the running requests, then the snapshots."""

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self._num_slots = 0
        self._matrices = self._windows = torch.empty(0)

    def allocate(self, num_slots: int, num_snapshots: int, device: torch.device) -> None:
        """Allocates the memory; what was there is lost."""
        self._num_slots = num_slots
        num_states = num_slots + num_snapshots
        self._matrices = torch.zeros((num_states, *self.shape.matrix), dtype=torch.float32, device=device)
        self._windows = torch.zeros((num_states, *self.shape.window), dtype=self.shape.dtype, device=device)

    def read(self, uses: list[StateUse], starts: list[int]) -> LayerState:
        """Returns copies of the states that chunks begin with. `starts` are the indexes of their first tokens."""
        states = torch.tensor([self._begin(use) for use in uses], device=self._matrices.device)
        matrices, windows = self._matrices[states], self._windows[states]
        for index, (use, start) in enumerate(zip(uses, starts, strict=True)):
            if start == 0 and use.loaded is None:
                matrices[index] = 0
                windows[index] = 0
        return LayerState(matrices, windows)

    def write(self, uses: list[StateUse], state: LayerState) -> None:
        """Stores the states of running requests."""
        slots = torch.tensor([use.slot for use in uses], device=self._matrices.device)
        self._matrices[slots] = state.matrices
        self._windows[slots] = state.windows

    def write_snapshot(self, snapshot: int, state: LayerState) -> None:
        """Stores the state of a single sequence as a snapshot."""
        self._matrices[self._num_slots + snapshot] = state.matrices[0]
        self._windows[self._num_slots + snapshot] = state.windows[0]

    def _begin(self, use: StateUse) -> int:
        return use.slot if use.loaded is None else self._num_slots + use.loaded
