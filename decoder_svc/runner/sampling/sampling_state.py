"""One request's state for sampling, kept on the host between steps: its random numbers and its counts of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

# Random numbers made by one call of the generator: creating it takes longer than drawing all of these.
_DRAWS_AT_ONCE = 128
# A Philox counter stands for this many 64-bit numbers (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
_PHILOX_WORDS = 4


class UniformDraws:
    """Numbers in [0, 1), one per token index, that depend only on the request's seed.

    The generator is counter-based (Philox). It keeps no state, so a preempted request gets the same numbers again.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._values: npt.NDArray[np.float64] = np.zeros(0)

    def __getitem__(self, index: int) -> float:
        place = index - self._first
        if not 0 <= place < len(self._values):
            generator = np.random.Generator(np.random.Philox(key=self._seed, counter=index))
            # The number of a token is the first one of its counter.
            self._values = generator.random(_DRAWS_AT_ONCE * _PHILOX_WORDS)[::_PHILOX_WORDS]
            self._first, place = index, 0
        return float(self._values[place])


class TokenCounts:
    """The distinct tokens of a sequence, and how often each occurs in its output."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        # The first `len(self._places)` are in use.
        self._ids: IntArray = np.zeros(64, dtype=np.int64)
        self._counts: IntArray = np.zeros(64, dtype=np.int64)
        self._places: dict[int, int] = {}

    def update(self, token_ids: IntArray) -> tuple[IntArray, IntArray]:
        """Returns distinct ids and their numbers of occurrences in the output, which the next call changes.

        `token_ids` is the whole sequence. It begins with the sequence of the last call, which is not counted again.
        """
        num_prompt = self._num_prompt_tokens
        if self._num_counted < num_prompt:
            for token_id in np.unique(token_ids[self._num_counted : num_prompt]).tolist():
                self._count(token_id, 0)
        for token_id in token_ids[max(self._num_counted, num_prompt) :].tolist():
            self._count(token_id, 1)
        self._num_counted = len(token_ids)
        return self._ids[: len(self._places)], self._counts[: len(self._places)]

    def _count(self, token_id: int, addend: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts = (
                np.concatenate([each, np.zeros_like(each)]) for each in (self._ids, self._counts)
            )
        self._ids[place] = token_id
        self._counts[place] += addend


class CountSlot:
    """One request's row of the counts that the device keeps, and how far it has been counted."""

    def __init__(self, index: int, free: Callable[[], object]) -> None:
        """`free` makes the row available to another request. Only its first call does something."""
        self.index = index
        self.free = free
        # Number of tokens at the beginning of the sequence that are counted; None: the row has to be counted anew.
        self.num_counted: int | None = None
        # Number of times that the row was counted anew.
        self.version = 0


class SamplingState:
    """Everything that a request's next tokens need besides its parameters."""

    def __init__(self, seed: int | None, num_prompt_tokens: int) -> None:
        """`seed` None counts as 0: a greedy request has none."""
        self.draws = UniformDraws(seed or 0)
        self.counts = TokenCounts(num_prompt_tokens)
        # None: the device keeps no counts of this request.
        self.slot: CountSlot | None = None

    def release(self) -> None:
        """Gives the slot back. Call it when the request leaves the batch."""
        if self.slot is not None:
            self.slot.free()
            self.slot = None
