"""Penalties on a request's earlier tokens: the interface of the sampler, and the computation with the host's counts.

The repetition penalty is that of CTRL (arXiv:1909.05858), over prompt and output. Presence and frequency penalties are
subtracted after it, over the output alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampling_batch import SamplingBatch
from decoder_svc.runner.sampling.sampling_state import IntArray

# The repetition penalty must not make numbers infinite.
LARGEST_SCORE = torch.finfo(torch.float32).max


def _ignore(_: object) -> None:
    """Does nothing, since the host learns the ids anyway."""


@dataclass(frozen=True, slots=True)
class PenalisedLogits:
    """The penalised logits of a step's rows, and how the tokens that are sampled from them get counted."""

    # Float32 `[num_rows, vocab]`, in memory of their own, which the sampler may change.
    logits: Tensor
    # Whether the next logits of the same requests can be penalised before the host knows the sampled ids.
    may_run_ahead: bool = False
    # Counts the sampled ids, int64 `[num_rows]` on the device. Call it before the next `apply`.
    count: Callable[[Tensor], None] = _ignore
    # Takes the indexes of rows for which other ids were counted than those that were sampled in the end.
    forget: Callable[[Iterable[int]], None] = _ignore


class Penalties(Protocol):
    """Penalises the logits of each step's rows for the tokens before them."""

    def apply(self, logits: Tensor, rows: Sequence[SampleRow], batch: SamplingBatch) -> PenalisedLogits:
        """Returns penalised logits of all rows; rows without penalties keep theirs.

        `logits` are `[num_rows, vocab]` in any floating-point type, and stay as they are. `batch` has the parameters of
        the rows.
        """
        ...


class HostPenalties:
    """Penalises the logits of tokens that occur in a sequence, and no others. The host counts them."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        """`move` copies a tensor from host memory to the device."""
        self._move = move

    def apply(self, logits: Tensor, rows: Sequence[SampleRow], batch: SamplingBatch) -> PenalisedLogits:
        """Implements Penalties.apply. The next step has to wait for the ids."""
        copied = logits.to(torch.float32, copy=True)
        self.change(copied, rows, batch.penalised, batch)
        return PenalisedLogits(copied)

    def change(self, logits: Tensor, rows: Sequence[SampleRow], indexes: Sequence[int], batch: SamplingBatch) -> None:
        """Penalises the rows with these indexes in place. `logits` are float32 and contiguous."""
        parts = [_penalties(rows[index], index, batch.vocab) for index in indexes]
        places = self._move(torch.from_numpy(np.concatenate([places for places, _ in parts])))
        numbers = self._move(torch.from_numpy(np.concatenate([numbers for _, numbers in parts], axis=1)))
        repetition, subtracted = numbers
        flat = logits.view(-1)
        scores = flat.index_select(0, places)
        if batch.has_repetition:
            scores = torch.where(scores > 0, scores / repetition, scores * repetition)
            scores = scores.clamp_(min=-LARGEST_SCORE, max=LARGEST_SCORE)
        flat.index_copy_(0, places, scores - subtracted)


def _penalties(row: SampleRow, index: int, vocab: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Returns the places in the flattened logits that a row's penalties change, and `[2, num_places]` numbers.

    The numbers are the repetition penalty and what is subtracted after it.
    """
    params = row.params
    ids, occurrences = row.counts()
    # Image placeholders may have ids beyond the vocabulary of the logits.
    is_known = ids < vocab
    ids, occurrences = ids[is_known], occurrences[is_known].astype(np.float32)
    numbers = np.full((2, len(ids)), params.repetition_penalty, dtype=np.float32)
    numbers[1] = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * occurrences
    numbers[1][occurrences == 0] = 0
    return index * vocab + ids, numbers
