"""The inputs of recorded steps that say where the states of recurrent layers are."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from decoder_svc.runner.graphs.inputs import InputBuffer, Spec, Staged
from decoder_svc.runner.input_batch import FlatInputs
from decoder_svc.runner.state_step import NO_STATE, PoolSizes, StateArrays, StateStep, state_arrays

_PREFIX = "state_"
_NAMES = tuple(field.name for field in fields(StateArrays))


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The parts of a buffer for one table of graphs.

    The sequences of a step come first. Those behind them have no tokens, or are padding: they begin with zeros, and
    leave the state that nobody reads.
    """

    pools: PoolSizes
    # Largest numbers of a step. A token takes at most one snapshot.
    num_tokens: int
    num_sequences: int

    @property
    def specs(self) -> dict[str, Spec]:
        """Element types and shapes of the parts, by name."""
        numbers = {
            "sources": self.num_sequences,
            "targets": self.num_sequences,
            "first_tokens": self.num_sequences + 1,
            "token_sequences": self.num_tokens,
            "first_snapshots": self.num_sequences + 1,
            "snapshot_tokens": self.num_tokens,
            "snapshot_states": self.num_tokens,
        }
        return {f"{_PREFIX}{name}": (torch.int64, (number,)) for name, number in numbers.items()}

    def fill(self, flat: FlatInputs | None, staged: Staged, first_tokens: np.ndarray) -> None:
        """Writes a step's numbers; None: padding alone.

        `first_tokens` are those of all sequences, padding included, and the number of tokens at the end.
        """
        parts = {name: staged[f"{_PREFIX}{name}"] for name in _NAMES}
        parts["sources"][:], parts["targets"][:] = NO_STATE, self.pools.unread_state
        for name in ("snapshot_tokens", "snapshot_states", "first_snapshots"):
            parts[name][:] = 0
        if flat is not None:
            given = state_arrays(flat.states, flat.kv_lens, flat.query_lens, self.pools)
            for name in ("sources", "targets", "snapshot_tokens", "snapshot_states", "first_snapshots"):
                numbers = getattr(given, name)
                parts[name][: len(numbers)] = numbers
            num_sequences, num_snapshots = len(given.targets), len(given.snapshot_states)
            parts["first_snapshots"][num_sequences + 1 :] = num_snapshots
        parts["first_tokens"][: len(first_tokens)] = first_tokens
        lengths = np.diff(first_tokens)
        parts["token_sequences"][: lengths.sum()] = np.repeat(np.arange(len(lengths)), lengths)

    def step(self, buffer: InputBuffer, num_tokens: int, num_sequences: int) -> StateStep:
        """Returns the tensors of a graph with so many tokens and sequences, padding included."""
        parts = {name: buffer.parts[f"{_PREFIX}{name}"] for name in _NAMES}
        return StateStep(
            sources=parts["sources"][:num_sequences],
            targets=parts["targets"][:num_sequences],
            first_tokens=parts["first_tokens"][: num_sequences + 1],
            token_sequences=parts["token_sequences"][:num_tokens],
            first_snapshots=parts["first_snapshots"][: num_sequences + 1],
            snapshot_tokens=parts["snapshot_tokens"][:num_tokens],
            snapshot_states=parts["snapshot_states"][:num_tokens],
        )
