"""Cosines and sines of rotary positions, computed once for each position and not in each step.

A step of one token took 0.16 ms for them (int4 weights of small-llava, a step of 6.5 ms; 2 × Intel Xeon, 2026-11-30):
about fifteen small operators of PyTorch, whose code is not in the processor's caches after a step has read all weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

# Rotary embeddings whose frequencies never depend on the length of a sequence, as those of "dynamic" and "longrope" do.
_FIXED_TYPES = ("default", "linear", "llama3", "yarn")
# Positions that are computed at a time.
_NUM_AT_ONCE = 1024
# Limit of what a table reserves: 134 MB with heads of 128. Angles of later positions are computed in each step.
_MOST_POSITIONS = 1 << 17


class RotaryTable:
    """The angles of tokens whose position is the same on all axes: all tokens of texts."""

    def __init__(self, rotary: Any, num_axes: int, num_positions: int) -> None:
        """`rotary` is a module of transformers; it takes positions `[1, T]`, or `[num_axes, 1, T]`.

        `num_positions` are those of the model.
        """
        self._rotary = rotary
        self._num_axes = num_axes
        size = rotary_angles(rotary, self._positions(0, 1))[0].shape[1]
        # Rows are written when they are needed: pages that nobody has written take no memory.
        self.cosines, self.sines = (torch.empty(min(num_positions, _MOST_POSITIONS), size) for _ in range(2))
        self._num_filled = 0

    @classmethod
    def of(cls, rotary: Any, num_axes: int, num_positions: int) -> RotaryTable | None:
        """Returns the table of a rotary embedding; None if its angles depend on more than the position."""
        if getattr(rotary, "rope_type", None) not in _FIXED_TYPES:
            return None
        table = cls(rotary, num_axes, num_positions)
        for position in (1, min(_NUM_AT_ONCE, num_positions) - 1):
            positions = table._positions(position, position + 1)
            found = rotary_angles(rotary, positions)
            if not table.covers(positions.view(num_axes, 1)):
                return None
            if not all(map(torch.equal, found, (table.cosines[position, None], table.sines[position, None]))):
                return None
        return table

    def covers(self, positions: Tensor) -> bool:
        """Whether the table has the angles of all tokens at these positions, int64 `[num_axes, num_tokens]`.

        Then the first axis has the rows of the tokens.
        """
        numbers = positions.numpy()
        if len(numbers) > 1 and (numbers[1:] != numbers[0]).any():
            return False
        # A negative position is among the largest numbers without a sign.
        highest = int(numbers[0].view(np.uint64).max())
        if highest >= len(self.cosines):
            return False
        while highest >= self._num_filled:
            self._fill()
        return True

    def _fill(self) -> None:
        start = self._num_filled
        stop = min(start + _NUM_AT_ONCE, len(self.cosines))
        with torch.inference_mode():
            self.cosines[start:stop], self.sines[start:stop] = rotary_angles(self._rotary, self._positions(start, stop))
        self._num_filled = stop

    def _positions(self, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop)[None]
        return positions if self._num_axes == 1 else positions.expand(self._num_axes, 1, -1)


def rotary_angles(rotary: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines that a module of transformers gives, float32 `[num_tokens, rotary_dim]`."""
    # The module reads type and device of its first argument.
    cosines, sines = (part[0].contiguous() for part in rotary(torch.empty(1, 0, 0), positions))
    return cosines, sines
