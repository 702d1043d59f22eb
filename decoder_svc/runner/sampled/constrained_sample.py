"""Samples rows some of which are constrained, by masks that come before the sample or behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decoder_svc.runner.input_batch import RequestRow
from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampler import PendingSample, TokenSampler
from decoder_svc.scheduling.sampling_params import AnswerSoFar

# One mask per token that a row samples; None: any token, or the first of the likeliest that its constraint takes.
RowMasks = list[bytes] | None
# The likeliest tokens that a constraint is asked about before it computes a mask. Each takes 1 µs if it may not come.
_NUM_LIKELIEST = 8


def begin_masks(rows: Sequence[RequestRow]) -> Callable[[], list[RowMasks]]:
    """Begins to compute the masks of these rows, drafts included, and returns a function that waits for them."""
    answers = [AnswerSoFar(row.constraint, row.token_ids, row.draft_ids) for row in rows if row.constraint is not None]
    if not answers:
        return lambda: [None] * len(rows)
    finish = answers[0].constraint.follower.begin_masks(answers)

    def masks() -> list[RowMasks]:
        found = iter(finish())
        return [None if row.constraint is None else next(found) for row in rows]

    return masks


def launch_sample(
    sampler: TokenSampler,
    logits: Tensor,
    rows: Sequence[RequestRow],
    masks: Sequence[RowMasks],
    likeliest: Tensor | None,
) -> PendingSample:
    """Samples these rows, as TokenSampler.launch does, and has constrained rows without masks checked.

    `logits` are `[num_samples, vocab]`, one more than drafts for each row.
    """
    samples = sample_rows(rows, masks)
    pending = sampler.launch(logits, samples, likeliest)
    checked: dict[int, AnswerSoFar] = {}
    place = 0
    for row, of_row in zip(rows, masks, strict=True):
        if row.constraint is not None and of_row is None:
            checked[place] = AnswerSoFar(row.constraint, row.token_ids)
        place += 1 + len(row.draft_ids)
    return _checked(sampler, logits, samples, pending, checked) if checked else pending


def sample_rows(rows: Sequence[RequestRow], masks: Sequence[RowMasks]) -> list[SampleRow]:
    """Returns the sampling parameters, preceding tokens and allowed tokens for each row of logits."""
    return [
        SampleRow(
            row.params,
            ids,
            row.num_prompt_tokens,
            row.sampling,
            num_drafts,
            None if of_row is None else of_row[num_drafts],
            _num_likeliest(row) if of_row is None else 0,
            is_known=row.unknown_place is None,
        )
        for row, of_row in zip(rows, masks, strict=True)
        for num_drafts, ids in enumerate(row.contexts())
    ]


def _num_likeliest(row: RequestRow) -> int:
    """Returns how many of the likeliest tokens its constraint chooses from. Log probabilities are only the first's."""
    if row.constraint is None:
        return 0
    return _NUM_LIKELIEST if row.params.logprobs is None else 1


def _checked(
    sampler: TokenSampler,
    logits: Tensor,
    samples: Sequence[SampleRow],
    pending: PendingSample,
    checked: dict[int, AnswerSoFar],
) -> PendingSample:
    """Takes the tokens that may come. `checked` are answers by the places of their samples."""
    sampled = pending.result()
    token_ids, logprobs = sampled.token_ids, sampled.logprobs
    answers = list(checked.values())
    # The mask is computed where all tokens are excluded, which leaves no guess.
    guesses = [sampled.likeliest[place] for place in checked]
    found = answers[0].constraint.follower.check(answers, guesses)
    refused: dict[int, bytes] = {}
    for place, of_answer, guess_or_mask in zip(checked, guesses, found, strict=True):
        if isinstance(guess_or_mask, bytes):
            refused[place] = guess_or_mask
        else:
            token_ids[place] = of_answer[guess_or_mask]
    if refused:
        masked = [replace(samples[place], mask=mask, num_likeliest=0) for place, mask in refused.items()]
        again = sampler.launch(logits[list(refused)], masked).result()
        for place, token_id, of_token in zip(refused, again.token_ids, again.logprobs, strict=True):
            token_ids[place], logprobs[place] = token_id, of_token
    return PendingSample(torch.tensor(token_ids), may_run_ahead=False, result=lambda: sampled)
