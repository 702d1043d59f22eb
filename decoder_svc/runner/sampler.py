"""Samples next tokens from logits, each row by its own request's parameters.

Greedy rows cost one argmax. A sampled row uses one uniform number that depends only on the request's seed and the
token's index: the same request gives the same tokens in any batch, and again after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.scheduling.request_output import TokenLogprobs
from decoder_svc.scheduling.sampling_params import SamplingParams

_LIMITS = torch.finfo(torch.float32)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sampling parameters and preceding tokens of one row of logits."""

    params: SamplingParams
    # Prompt and generated ids, [num_tokens].
    token_ids: npt.NDArray[np.int64]
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens already generated: the index of the next one in the answer."""
        return len(self.token_ids) - self.num_prompt_tokens


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Returns one token per row of `logits` `[num_rows, vocab]`, and log probabilities where requested.

    Log probabilities are those of the raw logits. Everything is computed on the logits' device; the host waits once,
    for the ids of all rows.
    """
    logits = logits.float()
    adjusted = _adjusted(logits, rows)
    chosen = adjusted.argmax(dim=-1)
    for index, row in enumerate(rows):
        if not row.params.is_greedy:
            chosen[index] = _draw(adjusted[index], row)
    logprobs = _logprobs(logits, chosen, rows)
    token_ids: list[int] = chosen.tolist()
    return token_ids, logprobs


def _adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Applies penalties, biases and `min_tokens`. Copies the logits only if a row changes them."""
    changed = [index for index, row in enumerate(rows) if _changes_logits(row)]
    if not changed:
        return logits
    logits = logits.clone()
    for index in changed:
        _adjust(logits[index], rows[index])
    return logits


def _changes_logits(row: SampleRow) -> bool:
    params = row.params
    penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return penalised or bool(params.logit_bias) or row.num_output_tokens < params.min_tokens


def _adjust(logits: Tensor, row: SampleRow) -> None:
    """Changes one row `[vocab]` in place.

    The repetition penalty is that of CTRL (arXiv:1909.05858), over prompt and output.
    """
    params = row.params
    if params.repetition_penalty != 1:
        seen = np.unique(row.token_ids)
        # Image placeholders may have ids beyond the vocabulary of the logits.
        seen = torch.from_numpy(seen[seen < len(logits)]).to(logits.device)
        scores = logits[seen]
        scores = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        logits[seen] = scores.clamp(min=_LIMITS.min, max=_LIMITS.max)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        ids, counts = np.unique(row.token_ids[row.num_prompt_tokens :], return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).to(logits)
        logits[torch.from_numpy(ids).to(logits.device)] -= penalty
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if row.num_output_tokens < params.min_tokens:
        logits[list(params.stop_token_ids)] = -torch.inf


def _draw(logits: Tensor, row: SampleRow) -> Tensor:
    """Applies temperature, top-k, top-p and min-p, in this order, and draws by the inverse distribution function.

    Returns a single id, left on the device.
    """
    params = row.params
    values, ids = logits.sort(descending=True)
    # Subtract the maximum before dividing: it becomes 0, so the smallest temperature cannot overflow the exponentials.
    values = (values.double() - values[0]) / params.temperature
    if params.top_k is not None:
        values, ids = values[: params.top_k], ids[: params.top_k]
    probabilities = values.softmax(dim=-1)
    # All false if the model's numbers overflowed: such a row gets the first id instead of failing the step.
    keep = ~probabilities.isnan()
    if params.top_p < 1:
        # A token is kept while the probability mass before it is below top_p.
        keep &= probabilities.cumsum(dim=-1) - probabilities < params.top_p
    if params.min_p > 0:
        keep &= probabilities >= params.min_p * probabilities[0]
    keep[0] = True
    mass = torch.where(keep, probabilities, 0.0).cumsum(dim=-1)
    point = _uniform(params.seed or 0, row.num_output_tokens) * mass[-1]
    index = torch.minimum(torch.searchsorted(mass, point, right=True), keep.sum() - 1)
    # `gather`: indexing with a zero-dimensional tensor would copy it to the host.
    return ids.gather(0, index[None])[0]


def _uniform(seed: int, index: int) -> float:
    """Returns a number in [0, 1) from a counter-based generator (Philox), which keeps no state across a preemption."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


def _logprobs(logits: Tensor, chosen: Tensor, rows: Sequence[SampleRow]) -> list[TokenLogprobs | None]:
    """Returns per row the chosen token and the requested number of most likely ones; None if not requested."""
    wanted = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
    if not wanted:
        return [None] * len(rows)
    asking = torch.tensor(list(wanted), device=logits.device)
    logprobs = logits[asking].log_softmax(dim=-1)
    ids = chosen[asking][:, None]
    likeliest = logprobs.topk(min(max(wanted.values()), logprobs.shape[1]))
    values = torch.cat([logprobs.gather(1, ids), likeliest.values], dim=1).tolist()
    ids = torch.cat([ids, likeliest.indices], dim=1).tolist()
    found = {
        index: TokenLogprobs(tuple(zip(of_row[: 1 + number], values_of_row[: 1 + number], strict=True)))
        for (index, number), of_row, values_of_row in zip(wanted.items(), ids, values, strict=True)
    }
    return [found.get(index) for index in range(len(rows))]
