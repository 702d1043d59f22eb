"""Samples next tokens from logits, all rows of a step at once, each by its own request's parameters.

A greedy row takes part in one argmax. A sampled row uses one uniform number that depends only on the request's seed and
the token's index: the same request gives the same tokens in any batch, and again after a preemption.

Sorting a whole vocabulary takes longer than everything else. Almost every draw falls on one of the likeliest tokens, so
only those are sorted. A draw that does not is found out on the device and repeated over the whole vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from decoder_svc.runner.sampling.penalties import HostPenalties, PenalisedLogits, Penalties
from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampling_batch import DrawGroup, SamplingBatch, stage_batch
from decoder_svc.scheduling.request_output import TokenLogprobs

# The token of a row whose draw lies beyond the sorted tokens, and of a row whose logits are NaN.
_BEYOND, _NAN = -1, -2
# Bounds a uniform number, so that its product with a sum is below the sum after rounding.
_LARGEST_UNIFORM = 1 - 2**-40


class SampledRows(NamedTuple):
    """The sampled tokens of a step's rows."""

    token_ids: list[int]
    # None for a row that did not ask.
    logprobs: list[TokenLogprobs | None]
    # Rows whose draw was repeated, and rows whose logits are NaN. These have any token.
    repeated: tuple[int, ...] = ()
    nan: tuple[int, ...] = ()
    # The likeliest tokens of each row that asked for them, fewer where others are excluded; empty if no row asked.
    likeliest: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class PendingSample:
    """The sampled tokens of a step's rows, which the device may not have computed yet."""

    # Ids on the device, int64 [num_rows]. A row whose draw has to be repeated has another id of the vocabulary, and so
    # has a row whose logits are NaN.
    token_ids: Tensor
    # Whether the next tokens of the same requests can be sampled before the host knows these. Masks need the ids on the
    # host, and so do penalties whose counts the host keeps.
    may_run_ahead: bool
    # Waits for the device.
    result: Callable[[], SampledRows]


class TokenSampler(Protocol):
    """Samples the rows of each step."""

    @property
    def is_immediate(self) -> bool:
        """Whether the tokens are known when `launch` returns. Only then may rows ask for their likeliest tokens."""
        ...

    def launch(self, logits: Tensor, rows: Sequence[SampleRow], likeliest: Tensor | None = None) -> PendingSample:
        """Returns one token per row of `logits` `[num_rows, vocab]`, and log probabilities where requested.

        `likeliest` are those of `likeliest_ids`, if they are known already. Log probabilities are those of the raw
        logits. Get the result before the next `launch`, unless it says `may_run_ahead`.
        """
        ...


def likeliest_ids(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the ids of the largest logits, int64 `[num_rows]`, in `out` if it is given; negative for a row of NaN."""
    return _with_nan(torch.argmax(logits, dim=-1, out=out), logits)


def _with_nan(ids: Tensor, logits: Tensor) -> Tensor:
    """Replaces the ids of rows whose logits are NaN. So the host gets to know them with the ids, without a copy more.

    If a hidden state is NaN, no logit of it is a number.
    """
    return ids.masked_fill_(logits[:, 0].isnan(), _NAN)


def _fetched(values: Tensor) -> Callable[[], Tensor]:
    return lambda: values


class Sampler:
    """Samples the rows of each step; keeps the parameters of the last batch on the device."""

    is_immediate = False

    def __init__(
        self,
        move: Callable[[Tensor], Tensor],
        fetch: Callable[[Tensor], Callable[[], Tensor]] = _fetched,
        penalties: Penalties | None = None,
    ) -> None:
        """`move` copies a tensor from host memory to the device. `fetch` starts a copy to the host.

        `fetch` returns a function that waits for the copy. Without `penalties`, the host computes them.
        """
        self.move = move
        self.fetch = fetch
        self.penalties = HostPenalties(move) if penalties is None else penalties
        self._batch: SamplingBatch | None = None

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], likeliest: Tensor | None = None
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Returns one token per row of `logits` `[num_rows, vocab]`, and log probabilities where requested.

        `likeliest` are those of `likeliest_ids`, if they are known already. Log probabilities are those of the raw
        logits. Everything is computed on the logits' device.
        """
        sampled = self.launch(logits, rows, likeliest).result()
        return sampled.token_ids, sampled.logprobs

    def launch(self, logits: Tensor, rows: Sequence[SampleRow], likeliest: Tensor | None = None) -> PendingSample:
        """Does what `sample` does without waiting for the device.

        Get the result before the next `launch`, unless it says `may_run_ahead`.
        """
        batch = self._staged(rows, logits.shape[1])
        masked = [index for index, row in enumerate(rows) if row.mask is not None]
        is_plain = not batch.changes_logits and not masked
        if likeliest is not None and not batch.groups and is_plain and batch.asking is None:
            # The memory of `likeliest` may be a graph's, which the next step overwrites.
            chosen = likeliest.clamp(min=0)
            return PendingSample(chosen, True, functools.partial(_finished, self.fetch(likeliest), None, batch))
        may_repeat = any(group.has_open_rows for group in batch.groups)
        penalised = self.penalties.apply(logits, rows, batch) if batch.penalised else None
        raw = logits
        if penalised is None or masked or batch.asking is not None:
            # A repeated draw needs the logits, whose memory may be a graph's, too.
            logits = logits.to(torch.float32, copy=may_repeat and likeliest is not None)
        adjusted = _adjusted(logits, penalised, batch)
        if masked:
            adjusted = self._masked(adjusted, logits, rows, masked)
        noted = _with_nan(self._chosen(adjusted, rows, batch, likeliest if is_plain else None), raw)
        ids = self.fetch(noted)
        may_run_ahead = not masked and (penalised is None or penalised.may_run_ahead)
        chosen = noted.clamp(min=0)
        if penalised is not None:
            penalised.count(chosen)
        logprobs = None if batch.asking is None else self.fetch(_logprobs(logits, chosen, batch))

        if not may_repeat:
            # The result holds no logits, so the next step can use their memory.
            finish = functools.partial(_finished, ids, logprobs, batch)
            return PendingSample(chosen, may_run_ahead, finish)
        asked = None if batch.asking is None else logits
        forget = None if penalised is None else penalised.forget

        def result() -> SampledRows:
            token_ids, nan = _ids_and_nan(ids())
            repeated = self._repeat(token_ids, adjusted, rows)
            numbers = logprobs
            if repeated and forget is not None:
                forget(repeated)
            if repeated and asked is not None:
                numbers = self.fetch(_logprobs(asked, self.move(torch.tensor(token_ids)), batch))
            return SampledRows(token_ids, _listed(numbers, batch), repeated, nan)

        return PendingSample(chosen, may_run_ahead, result)

    def _staged(self, rows: Sequence[SampleRow], vocab: int) -> SamplingBatch:
        """Returns the parameters of these rows on the device; copies them only if they differ from the last step's."""
        params = tuple(row.params for row in rows)
        below_min = tuple(row.num_output_tokens < row.params.min_tokens for row in rows)
        if self._batch is None or not self._batch.holds(params, below_min, vocab):
            self._batch = stage_batch(params, below_min, vocab, self.move)
        return self._batch

    def _masked(self, adjusted: Tensor, logits: Tensor, rows: Sequence[SampleRow], masked: list[int]) -> Tensor:
        """Excludes the tokens that constrained rows may not have next. `logits` stay as they are.

        A constraint is stronger than biases and `min_tokens`: where these exclude all that is left, they do not count.
        """
        words = np.frombuffer(b"".join(row.mask for row in rows if row.mask is not None), dtype=np.uint8)
        allowed = unpacked_masks(self.move(torch.from_numpy(words.reshape(len(masked), -1).copy())), logits.shape[1])
        places = None if len(masked) == len(rows) else self.move(torch.tensor(masked))
        found = torch.where(allowed, _rows(adjusted, places), -torch.inf)
        if adjusted is not logits:
            is_empty = found.amax(1, keepdim=True) == -torch.inf
            found = torch.where(is_empty, torch.where(allowed, _rows(logits, places), -torch.inf), found)
        # A logit of -inf or NaN excludes no token that may come: it may be the only one.
        least = torch.finfo(found.dtype).min
        found = torch.where(allowed, found.nan_to_num(nan=least, neginf=least, posinf=torch.inf), -torch.inf)
        if places is None:
            return found
        return (logits.clone() if adjusted is logits else adjusted).index_copy_(0, places, found)

    def _chosen(
        self, logits: Tensor, rows: Sequence[SampleRow], batch: SamplingBatch, likeliest: Tensor | None = None
    ) -> Tensor:
        """Returns one id per row, left on the device; `_BEYOND` where the draw has to be repeated."""
        if len(batch.groups) == 1 and batch.groups[0].places is None:
            return self._draw(logits, rows, batch.groups[0])
        chosen = logits.argmax(dim=-1) if likeliest is None else likeliest.clone()
        for group in batch.groups:
            assert group.places is not None, "rows of different kinds are selected by their places"
            drawn = self._draw(logits.index_select(0, group.places), rows, group)
            chosen.index_copy_(0, group.places, drawn)
        return chosen

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow], group: DrawGroup) -> Tensor:
        numbers = [rows[index].state.draws[rows[index].num_output_tokens] for index in group.rows]
        uniform = np.minimum(np.array(numbers), _LARGEST_UNIFORM)
        return draw(logits, self.move(torch.from_numpy(uniform))[:, None], group)

    def _repeat(self, token_ids: list[int], logits: Tensor, rows: Sequence[SampleRow]) -> tuple[int, ...]:
        """Draws again, over the whole vocabulary, the tokens that lie beyond the sorted ones; returns their rows."""
        beyond = tuple(index for index, token_id in enumerate(token_ids) if token_id == _BEYOND)
        if not beyond:
            return ()
        again = [rows[index] for index in beyond]
        batch = stage_batch(
            tuple(row.params for row in again), (False,) * len(again), logits.shape[1], self.move, is_whole=True
        )
        places = self.move(torch.tensor(beyond))
        drawn = self._chosen(logits.index_select(0, places), again, batch)
        for index, token_id in zip(beyond, drawn.tolist(), strict=True):
            token_ids[index] = token_id
        return beyond


def _adjusted(logits: Tensor, penalised: PenalisedLogits | None, batch: SamplingBatch) -> Tensor:
    """Applies biases and `min_tokens` after penalties, in this order. `logits` stay as they are."""
    if not batch.changes_logits:
        return logits
    adjusted = logits.clone() if penalised is None else penalised.logits
    flat = adjusted.view(-1)
    if batch.bias_places is not None:
        flat.index_add_(0, batch.bias_places, batch.biases)
    if batch.stop_places is not None:
        flat.index_fill_(0, batch.stop_places, -torch.inf)
    return adjusted


def _rows(logits: Tensor, places: Tensor | None) -> Tensor:
    """Returns the rows at these places; None: all rows."""
    return logits if places is None else logits.index_select(0, places)


def unpacked_masks(masks: Tensor, vocab: int) -> Tensor:
    """Returns masks of bits, uint8 `[num_rows, num_bytes]`, as bools `[num_rows, vocab]`; the lowest bit is first."""
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=masks.device)
    return (masks[:, :, None] & bits).ne(0).view(len(masks), -1)[:, :vocab]


def _finished(ids: Callable[[], Tensor], logprobs: Callable[[], Tensor] | None, batch: SamplingBatch) -> SampledRows:
    token_ids, nan = _ids_and_nan(ids())
    return SampledRows(token_ids, _listed(logprobs, batch), nan=nan)


def _ids_and_nan(noted: Tensor) -> tuple[list[int], tuple[int, ...]]:
    """Returns the ids and the rows whose logits are NaN, which get the id 0."""
    token_ids: list[int] = noted.tolist()
    if _NAN not in token_ids:
        return token_ids, ()
    nan = tuple(index for index, token_id in enumerate(token_ids) if token_id == _NAN)
    return [0 if token_id == _NAN else token_id for token_id in token_ids], nan


def _logprobs(logits: Tensor, token_ids: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns the log probabilities of the rows that ask, `[num_asking, 1 + most, 2]`: the chosen token, the likeliest.

    The last axis has an id and its number. float64 holds every id and every float32 exactly.
    """
    logprobs = logits.index_select(0, batch.asking).log_softmax(dim=-1)
    ids = token_ids.index_select(0, batch.asking)[:, None]
    likeliest = logprobs.topk(min(max(number for _, number in batch.wanted), batch.vocab))
    values = torch.cat([logprobs.gather(1, ids), likeliest.values], dim=1).double()
    return torch.stack([torch.cat([ids, likeliest.indices], dim=1).double(), values], dim=-1)


def _listed(numbers: Callable[[], Tensor] | None, batch: SamplingBatch) -> list[TokenLogprobs | None]:
    """Returns per row the chosen token and the requested number of likeliest ones; None if not requested."""
    found: list[TokenLogprobs | None] = [None] * len(batch.params)
    for (index, number), of_row in zip(batch.wanted, () if numbers is None else numbers().tolist(), strict=True):
        found[index] = TokenLogprobs(tuple((int(each), value) for each, value in of_row[: 1 + number]))
    return found


def draw(logits: Tensor, uniform: Tensor, group: DrawGroup) -> Tensor:
    """Applies temperature, top-k, top-p and min-p, in this order, and draws by the inverse distribution function.

    `logits` and `uniform` (`[num_rows, 1]`, float64) are those of the group's rows. Returns one id per row, left on the
    device: `_BEYOND` if it is not among the `group.width` likeliest.
    """
    values, ids = logits.topk(group.width)
    largest = values[:, :1]
    # Subtract the maximum before dividing: it becomes 0, so the smallest temperature cannot overflow the exponentials.
    # Weights are relative to that of the likeliest token. They are in float64, since their sums are compared.
    weights = ((values.double() - largest) / group.temperature).exp_()
    if group.is_beyond_top_k is not None:
        weights.masked_fill_(group.is_beyond_top_k, 0)
    mass = weights.cumsum(1)
    total = mass[:, -1:]
    if group.has_open_rows:
        all_weights = (logits - largest).div_(group.temperature_float32).exp_()
        total = torch.where(group.is_open, all_weights.sum(1, keepdim=True, dtype=torch.float64), total)
    kept = weights
    if group.top_p is not None:
        # A token is kept while the probability mass before it is below top_p.
        kept = kept.masked_fill(mass - weights >= group.top_p * total, 0)
    if group.min_p is not None:
        kept = kept.masked_fill(weights < group.min_p, 0)
    if kept is not weights:
        mass = kept.cumsum(1)
        total = torch.where(group.is_cut, mass[:, -1:], total)
    # The first token whose mass, with all before it, is above the drawn one. Comparisons with NaN are false: a row of
    # overflown numbers gets the first id instead of failing the step.
    index = (mass <= uniform * total).sum(1, keepdim=True)
    chosen = ids.gather(1, index.clamp(max=group.width - 1))
    if group.has_open_rows:
        # A cut row is complete if its last weight here is already cut off.
        is_beyond = torch.where(group.is_cut, kept[:, -1:] > 0, index >= group.width)
        chosen = chosen.masked_fill(is_beyond & group.is_open, _BEYOND)
    return chosen[:, 0]
