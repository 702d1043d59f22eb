"""Convolutions of each channel over the tokens of a step's sequences, with operators of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from decoder_svc.runner.recurrent.state_pools import StatePool
from decoder_svc.runner.state_step import StateStep


def window_sums(inputs: Tensor, pool: StatePool, filters: Tensor, bias: Tensor | None, step: StateStep) -> Tensor:
    """Returns the sums `[num_tokens, channels]`, float32, of each token's last inputs times filters, in one order.

    Inputs in front of a sequence's tokens come from its state, and the pool's windows are changed. `filters` are
    `[kernel_size, channels]`, and `bias` `[channels]`, both float32.
    """
    windows = pool.windows_before(step)
    num_kept = windows.shape[1]
    first_tokens = step.first_tokens.tolist()
    parts: list[Tensor] = []
    for window, (first, stop) in zip(windows, pairwise(first_tokens), strict=True):
        parts += [window, inputs[first:stop]]
    # Each sequence's window, then its tokens.
    padded = torch.cat(parts)
    num_outputs = len(padded) - num_kept
    sums = padded[:num_outputs].float() * filters[0]
    for tap in range(1, len(filters)):
        sums += padded[tap : tap + num_outputs].float() * filters[tap]
    if bias is not None:
        sums += bias
    rows = [index * num_kept + token for index, span in enumerate(pairwise(first_tokens)) for token in range(*span)]
    pool.write_left_windows(step, _left_windows(padded, first_tokens, num_kept, step))
    return sums[torch.tensor(rows, device=sums.device)]


def _left_windows(padded: Tensor, first_tokens: Sequence[int], num_kept: int, step: StateStep) -> Tensor:
    """Returns the last inputs of each sequence, then those that each snapshot has seen."""
    begins = [index * num_kept + first for index, first in enumerate(first_tokens)]
    ends = [*begins[1:]]
    num_snapshots = [stop - first for first, stop in pairwise(step.first_snapshots.tolist())]
    begin_of_each = [begin for begin, number in zip(begins, num_snapshots, strict=False) for _ in range(number)]
    seen = step.snapshot_tokens.tolist()
    ends += [begin + num_kept + tokens for begin, tokens in zip(begin_of_each, seen, strict=True)]
    rows = torch.tensor([[*range(end - num_kept, end)] for end in ends], dtype=torch.int64, device=padded.device)
    return padded[rows]
