"""The sampling parameters of a step's rows as tensors, copied to the device only when the batch changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.scheduling.sampling_params import SamplingParams

# Likeliest tokens that are sorted. With temperature 1 and no other limit, they hold more than 95 % of the probability
# of most models' tokens.
SORTED_TOKENS = 256
# Rows that sort the whole vocabulary at once: their sums in float64 take 8 bytes for each token, several times.
_WIDE_ROWS = 4
# float32 cannot hold the smallest temperatures of float64, and 0 would give NaN.
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
_Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Sampled rows that sort the same number of tokens. Tensors are `[num_rows, 1]` unless stated."""

    # Indexes of the rows on the host, and on the device, int64 [num_rows]; None there if they are all rows.
    rows: tuple[int, ...]
    places: Tensor | None
    # Number of likeliest tokens that are sorted.
    width: int
    # float64 and float32.
    temperature: Tensor
    temperature_float32: Tensor
    # Whether a sorted token is behind the row's top-k, [num_rows, width]; None without top-k in any row.
    is_beyond_top_k: Tensor | None
    # float64; None if no row has the limit. Infinite for rows without top-p, so that rounding cuts nothing off.
    top_p: Tensor | None
    min_p: Tensor | None
    # Whether top-p or min-p may drop a token.
    is_cut: Tensor
    # Whether tokens that are not sorted may be drawn.
    is_open: Tensor
    # Whether any row is open.
    has_open_rows: bool


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of all rows of a step, in the order of the rows."""

    params: tuple[SamplingParams, ...]
    # Per row: whether stop ids are not allowed yet.
    below_min: tuple[bool, ...]
    # Logits per row.
    vocab: int
    groups: tuple[DrawGroup, ...]
    # Rows with a penalty on earlier tokens.
    penalised: tuple[int, ...]
    has_repetition: bool
    # Places in the flattened logits: of biases with their addends, float32, and of stop ids that are not allowed yet.
    bias_places: Tensor | None
    biases: Tensor | None
    stop_places: Tensor | None
    # Rows that ask for log probabilities: their indexes with the numbers of alternatives, and the indexes alone on the
    # device, None without such rows.
    wanted: tuple[tuple[int, int], ...]
    asking: Tensor | None

    @property
    def changes_logits(self) -> bool:
        """Whether any row changes its logits before sampling."""
        return bool(self.penalised) or self.bias_places is not None or self.stop_places is not None

    def holds(self, params: Sequence[SamplingParams], below_min: tuple[bool, ...], vocab: int) -> bool:
        """Whether these are the parameters of this batch. Objects are compared by identity, which takes less time."""
        return (
            len(params) == len(self.params)
            and vocab == self.vocab
            and below_min == self.below_min
            and all(one is other for one, other in zip(params, self.params, strict=True))
        )


def stage_batch(
    params: tuple[SamplingParams, ...],
    below_min: tuple[bool, ...],
    vocab: int,
    move: _Move,
    *,
    is_whole: bool = False,
) -> SamplingBatch:
    """Copies the parameters of a step's rows to the device. `is_whole` sorts the whole vocabulary."""
    sampled = [index for index, row in enumerate(params) if not row.is_greedy]
    wide = [index for index in sampled if is_whole or SORTED_TOKENS < (params[index].top_k or 0) < vocab]
    narrow = sorted({*sampled} - {*wide})
    groups = [(narrow, min(SORTED_TOKENS, vocab))]
    groups += [(wide[first : first + _WIDE_ROWS], vocab) for first in range(0, len(wide), _WIDE_ROWS)]
    bias = [(index * vocab + each, addend) for index, row in enumerate(params) for each, addend in row.logit_bias]
    stops = [
        index * vocab + each
        for index, (row, is_below) in enumerate(zip(params, below_min, strict=True))
        if is_below
        for each in row.stop_token_ids
    ]
    wanted = tuple((index, row.logprobs) for index, row in enumerate(params) if row.logprobs is not None)
    penalised = tuple(index for index, row in enumerate(params) if row.is_penalised)
    return SamplingBatch(
        params=params,
        below_min=below_min,
        vocab=vocab,
        groups=tuple(_group(rows, params, width, vocab, move) for rows, width in groups if rows),
        penalised=penalised,
        has_repetition=any(params[index].repetition_penalty != 1 for index in penalised),
        bias_places=_moved([place for place, _ in bias], torch.int64, move),
        biases=_moved([addend for _, addend in bias], torch.float32, move),
        stop_places=_moved(stops, torch.int64, move),
        wanted=wanted,
        asking=_moved([index for index, _ in wanted], torch.int64, move),
    )


def _moved(values: Sequence[float], dtype: torch.dtype, move: _Move) -> Tensor | None:
    return move(torch.tensor(values, dtype=dtype)) if values else None


def _group(rows: Sequence[int], params: Sequence[SamplingParams], width: int, vocab: int, move: _Move) -> DrawGroup:
    of_rows = [params[index] for index in rows]
    top_k = [row.top_k if row.top_k is not None and row.top_k < vocab else None for row in of_rows]
    is_open = [limit is None and width < vocab for limit in top_k]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return move(torch.tensor(values, dtype=dtype)[:, None])

    ranks = torch.arange(width)[None]
    limits = torch.tensor([width if limit is None else limit for limit in top_k])[:, None]
    return DrawGroup(
        rows=tuple(rows),
        places=None if len(rows) == len(params) else _moved(rows, torch.int64, move),
        width=width,
        temperature=column([row.temperature for row in of_rows]),
        temperature_float32=column([max(row.temperature, _LEAST_TEMPERATURE) for row in of_rows], torch.float32),
        is_beyond_top_k=None if not any(top_k) else move(ranks >= limits),
        top_p=column([row.top_p if row.top_p < 1 else math.inf for row in of_rows])
        if any(row.top_p < 1 for row in of_rows)
        else None,
        min_p=column([row.min_p for row in of_rows]) if any(row.min_p > 0 for row in of_rows) else None,
        is_cut=column([row.top_p < 1 or row.min_p > 0 for row in of_rows], torch.bool),
        is_open=column(is_open, torch.bool),
        has_open_rows=any(is_open),
    )
