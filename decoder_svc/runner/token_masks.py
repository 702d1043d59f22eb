"""Masks of the tokens that constrained requests may have next, computed beside a step's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decoder_svc.runner.input_batch import RequestRow
from decoder_svc.scheduling.sampling_params import AnswerSoFar

# One mask per token that a row samples; None: any token.
RowMasks = list[bytes] | None


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
