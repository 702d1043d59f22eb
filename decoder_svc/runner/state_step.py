"""The places of a step's states in their pools, as numbers for the kernels of recurrent layers.

The pools of all layers have the same places: first the states of the running requests, then the snapshots, and at last
one state that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.scheduling.scheduler_output import StateUse

Int64Array = npt.NDArray[np.int64]
# The source of a sequence that begins with zeros.
NO_STATE = -1


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Numbers of states in a pool."""

    num_slots: int
    num_snapshots: int

    @property
    def unread_state(self) -> int:
        """The state that takes what padding leaves."""
        return self.num_slots + self.num_snapshots

    @property
    def num_states(self) -> int:
        """The number of all states, with the one that nobody reads."""
        return self.unread_state + 1

    def check(self, uses: Iterable[StateUse]) -> None:
        """Raises IndexError for a slot or a snapshot that is not there.

        Kernels check no bounds, and a slot behind the last one would be a snapshot.
        """
        for use in uses:
            snapshots = [snapshot for _, snapshot in use.taken] + ([] if use.loaded is None else [use.loaded])
            is_inside = all(0 <= each < self.num_snapshots for each in snapshots)
            if not 0 <= use.slot < self.num_slots or not is_inside:
                raise IndexError(f"{use} is outside of {self}")


@dataclass(frozen=True, slots=True)
class StateArrays:
    """The numbers of a `StateStep` on the host."""

    sources: Int64Array
    targets: Int64Array
    first_tokens: Int64Array
    token_sequences: Int64Array
    first_snapshots: Int64Array
    snapshot_tokens: Int64Array
    snapshot_states: Int64Array


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states of a step's sequences, int64 on the device."""

    # State that each sequence begins with; negative: it begins with zeros.
    sources: Tensor
    # State that each sequence leaves.
    targets: Tensor
    # First token of each sequence in the step, and the number of tokens at the end.
    first_tokens: Tensor
    # Index of the sequence of each token.
    token_sequences: Tensor
    # First snapshot of each sequence, and the number of snapshots at the end.
    first_snapshots: Tensor
    # Per snapshot: the number of its sequence's new tokens that it has seen, ascending in a sequence, and its state.
    snapshot_tokens: Tensor
    snapshot_states: Tensor

    @classmethod
    def of(cls, arrays: StateArrays, move: Callable[[Tensor], Tensor]) -> StateStep:
        """Copies the numbers to the device."""
        return cls(*(move(torch.from_numpy(getattr(arrays, name))) for name in cls.__slots__))


def state_arrays(
    uses: Sequence[StateUse], kv_lens: Sequence[int], lengths: Sequence[int], sizes: PoolSizes
) -> StateArrays:
    """Returns the places of a step's states.

    `lengths` are the numbers of new tokens, `kv_lens` those of all tokens of the sequences. Raises IndexError for a
    slot or a snapshot that the pools do not have.
    """
    sizes.check(uses)
    starts = [kv_len - length for kv_len, length in zip(kv_lens, lengths, strict=True)]
    taken = [sorted(use.taken) for use in uses]

    def integers(values: Iterable[int]) -> Int64Array:
        return np.fromiter(values, dtype=np.int64)

    return StateArrays(
        sources=integers(_source(use, start, sizes) for use, start in zip(uses, starts, strict=True)),
        targets=integers(use.slot for use in uses),
        first_tokens=integers(accumulate(lengths, initial=0)),
        token_sequences=np.repeat(np.arange(len(lengths)), lengths),
        first_snapshots=integers(accumulate(map(len, taken), initial=0)),
        snapshot_tokens=integers(
            tokens - start for each, start in zip(taken, starts, strict=True) for tokens, _ in each
        ),
        snapshot_states=integers(sizes.num_slots + snapshot for each in taken for _, snapshot in each),
    )


def is_new(use: StateUse, start: int) -> bool:
    """Whether a sequence begins at its first token, and not from a snapshot."""
    return start == 0 and use.loaded is None


def _source(use: StateUse, start: int, sizes: PoolSizes) -> int:
    if is_new(use, start):
        return NO_STATE
    return use.slot if use.loaded is None else sizes.num_slots + use.loaded
