"""The states of recurrent layers: one per running request, and the snapshots of the prefix cache.

The scheduler decides which state a chunk begins with and where it is copied to (state_group.py). No two sequences of a
step write the same state, and none writes a snapshot that another one reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """The places of a step's states in their pool, int64 except for the pool itself."""

    # [num_states, heads, key_dim, value_dim], float32.
    matrices: Tensor
    # State that each sequence begins with; negative: it begins with zeros.
    sources: Tensor
    # State that each sequence leaves.
    targets: Tensor
    # First token of each sequence in the step, and the number of tokens at the end.
    first_tokens: Tensor
    # First snapshot of each sequence, and the number of snapshots at the end.
    first_snapshots: Tensor
    # Per snapshot: the number of its sequence's new tokens that it has seen, ascending in a sequence, and its state.
    snapshot_tokens: Tensor
    snapshot_states: Tensor


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

    def read(self, uses: Sequence[StateUse], starts: Sequence[int]) -> LayerState:
        """Returns copies of the states that chunks begin with. `starts` are the indexes of their first tokens."""
        return LayerState(self.read_matrices(uses, starts), self.read_windows(uses, starts))

    def read_matrices(self, uses: Sequence[StateUse], starts: Sequence[int]) -> Tensor:
        """Returns copies of the matrices alone, `[num_sequences, heads, key_dim, value_dim]`."""
        return self._copies(self._matrices, uses, starts)

    def read_windows(self, uses: Sequence[StateUse], starts: Sequence[int]) -> Tensor:
        """Returns copies of the windows alone, `[num_sequences, channels, kernel_size - 1]`."""
        return self._copies(self._windows, uses, starts)

    def step_places(self, uses: Sequence[StateUse], starts: Sequence[int], lengths: Sequence[int]) -> StepPlaces:
        """Returns where the states of a step are, for a kernel that changes the matrices in place.

        `starts` are the indexes of the sequences' first new tokens, `lengths` the numbers of new tokens. Raises
        IndexError for a slot or a snapshot that the pool does not have: a kernel checks no bounds, and a slot behind
        the last one would be a snapshot.
        """
        self._check(uses)
        sources = [-1 if _is_new(use, start) else self._begin(use) for use, start in zip(uses, starts, strict=True)]
        taken = [sorted(use.taken) for use in uses]
        seen = [tokens - start for each, start in zip(taken, starts, strict=True) for tokens, _ in each]

        def integers(values: Iterable[int]) -> Tensor:
            return torch.tensor([*values], dtype=torch.int64)

        return StepPlaces(
            self._matrices,
            sources=integers(sources),
            targets=integers(use.slot for use in uses),
            first_tokens=integers(accumulate(lengths, initial=0)),
            first_snapshots=integers(accumulate(map(len, taken), initial=0)),
            snapshot_tokens=integers(seen),
            snapshot_states=integers(self._num_slots + snapshot for each in taken for _, snapshot in each),
        )

    def write_left_windows(self, places: StepPlaces, windows: Tensor) -> None:
        """Stores windows `[num_sequences + num_snapshots, kernel_size - 1, channels]` in a step's states."""
        self._windows[torch.cat((places.targets, places.snapshot_states))] = windows.transpose(1, 2)

    def write(self, uses: Sequence[StateUse], state: LayerState) -> None:
        """Stores the states of running requests."""
        self.write_matrices(uses, state.matrices)
        self.write_windows(uses, state.windows)

    def write_matrices(self, uses: Sequence[StateUse], matrices: Tensor) -> None:
        """Stores the matrices of running requests, and leaves their windows."""
        self._matrices[torch.tensor([use.slot for use in uses], device=self._matrices.device)] = matrices

    def write_windows(self, uses: Sequence[StateUse], windows: Tensor) -> None:
        """Stores the windows of running requests, and leaves their matrices."""
        self._windows[torch.tensor([use.slot for use in uses], device=self._windows.device)] = windows

    def take_snapshot(self, use: StateUse, snapshot: int) -> None:
        """Copies the state of a running request to a snapshot."""
        for states in (self._matrices, self._windows):
            states[self._num_slots + snapshot] = states[use.slot]

    def write_snapshot(self, snapshot: int, state: LayerState) -> None:
        """Stores the state of a single sequence as a snapshot."""
        self._matrices[self._num_slots + snapshot] = state.matrices[0]
        self._windows[self._num_slots + snapshot] = state.windows[0]

    def _check(self, uses: Sequence[StateUse]) -> None:
        num_snapshots = len(self._matrices) - self._num_slots
        for use in uses:
            snapshots = [snapshot for _, snapshot in use.taken] + ([] if use.loaded is None else [use.loaded])
            if not 0 <= use.slot < self._num_slots or not all(0 <= each < num_snapshots for each in snapshots):
                raise IndexError(f"{use} is outside of a pool of {self._num_slots} slots and {num_snapshots} snapshots")

    def _copies(self, states: Tensor, uses: Sequence[StateUse], starts: Sequence[int]) -> Tensor:
        found = states[torch.tensor([self._begin(use) for use in uses], device=states.device)]
        for index, (use, start) in enumerate(zip(uses, starts, strict=True)):
            if _is_new(use, start):
                found[index] = 0
        return found

    def _begin(self, use: StateUse) -> int:
        return use.slot if use.loaded is None else self._num_slots + use.loaded


def _is_new(use: StateUse, start: int) -> bool:
    """Whether a sequence begins here, and not from a snapshot."""
    return start == 0 and use.loaded is None
