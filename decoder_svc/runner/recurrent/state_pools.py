"""The states of recurrent layers: one per running request, and the snapshots of the prefix cache.

The scheduler decides which state a chunk begins with and where it is copied to (state_group.py). No two sequences of a
step write the same state, and none writes a snapshot that another one reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.runner.state_step import PoolSizes, StateStep, is_new
from decoder_svc.scheduling.scheduler_output import StateUse


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shapes of one layer's state."""

    # The recurrent matrix, [heads, key_dim, value_dim], float32; zeros if the layer has none.
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
    """The states of one layer, in the order of `PoolSizes`."""

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self._sizes = PoolSizes(0, 0)
        # [num_states, heads, key_dim, value_dim], float32, and [num_states, channels, kernel_size - 1].
        self.matrices = self.windows = torch.empty(0)

    def allocate(self, sizes: PoolSizes, device: torch.device) -> None:
        """Allocates the memory; what was there is lost."""
        self._sizes = sizes
        self.matrices = torch.zeros((sizes.num_states, *self.shape.matrix), dtype=torch.float32, device=device)
        self.windows = torch.zeros((sizes.num_states, *self.shape.window), dtype=self.shape.dtype, device=device)

    # For kernels that find the states by themselves.

    def windows_before(self, step: StateStep) -> Tensor:
        """Returns copies of the windows that sequences begin with, `[num_sequences, kernel_size - 1, channels]`."""
        found = self.windows[step.sources.clamp(min=0)]
        found[step.sources < 0] = 0
        return found.transpose(1, 2)

    def matrices_before(self, step: StateStep) -> Tensor:
        """Returns copies of the matrices that sequences begin with, `[num_sequences, heads, key_dim, value_dim]`."""
        found = self.matrices[step.sources.clamp(min=0)]
        found[step.sources < 0] = 0
        return found

    def write_left_windows(self, step: StateStep, windows: Tensor) -> None:
        """Stores windows `[num_sequences + num_snapshots, kernel_size - 1, channels]` in a step's states."""
        self.windows[torch.cat((step.targets, step.snapshot_states))] = windows.transpose(1, 2)

    # For computing sequence by sequence.

    def read(self, uses: Sequence[StateUse], starts: Sequence[int]) -> LayerState:
        """Returns copies of the states that chunks begin with. `starts` are the indexes of their first tokens."""
        return LayerState(self.read_matrices(uses, starts), self.read_windows(uses, starts))

    def read_matrices(self, uses: Sequence[StateUse], starts: Sequence[int]) -> Tensor:
        """Returns copies of the matrices alone, `[num_sequences, heads, key_dim, value_dim]`."""
        return self._copies(self.matrices, uses, starts)

    def read_windows(self, uses: Sequence[StateUse], starts: Sequence[int]) -> Tensor:
        """Returns copies of the windows alone, `[num_sequences, channels, kernel_size - 1]`."""
        return self._copies(self.windows, uses, starts)

    def write(self, uses: Sequence[StateUse], state: LayerState) -> None:
        """Stores the states of running requests."""
        self.write_matrices(uses, state.matrices)
        self.write_windows(uses, state.windows)

    def write_matrices(self, uses: Sequence[StateUse], matrices: Tensor) -> None:
        """Stores the matrices of running requests, and leaves their windows."""
        self.matrices[torch.tensor([use.slot for use in uses], device=self.matrices.device)] = matrices

    def write_windows(self, uses: Sequence[StateUse], windows: Tensor) -> None:
        """Stores the windows of running requests, and leaves their matrices."""
        self.windows[torch.tensor([use.slot for use in uses], device=self.windows.device)] = windows

    def take_snapshot(self, use: StateUse, snapshot: int) -> None:
        """Copies the state of a running request to a snapshot."""
        for states in (self.matrices, self.windows):
            states[self._sizes.num_slots + snapshot] = states[use.slot]

    def write_snapshot(self, snapshot: int, state: LayerState) -> None:
        """Stores the state of a single sequence as a snapshot."""
        self.matrices[self._sizes.num_slots + snapshot] = state.matrices[0]
        self.windows[self._sizes.num_slots + snapshot] = state.windows[0]

    def _copies(self, states: Tensor, uses: Sequence[StateUse], starts: Sequence[int]) -> Tensor:
        found = states[torch.tensor([self._begin(use) for use in uses], device=states.device)]
        for index, (use, start) in enumerate(zip(uses, starts, strict=True)):
            if is_new(use, start):
                found[index] = 0
        return found

    def _begin(self, use: StateUse) -> int:
        return use.slot if use.loaded is None else self._sizes.num_slots + use.loaded
