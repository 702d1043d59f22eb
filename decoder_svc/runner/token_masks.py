"""Masks of the tokens that constrained requests may have next, computed beside a step's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from decoder_svc.runner.input_batch import RequestRow

# One mask per token that a row samples; None: any token.
RowMasks = list[bytes] | None


class TokenMasks:
    """Computes masks on a thread of its own: llguidance gives up the interpreter meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token-masks")

    def begin(self, rows: Sequence[RequestRow]) -> Callable[[], list[RowMasks]]:
        """Starts to compute the masks of these rows, drafts included, and returns a function that waits for them.

        The rows must not change until then.
        """
        if all(row.constraint is None for row in rows):
            return lambda: [None] * len(rows)
        return self._thread.submit(_masks, rows).result


def _masks(rows: Sequence[RequestRow]) -> list[RowMasks]:
    return [None if row.constraint is None else row.constraint.masks(row.token_ids, row.draft_ids) for row in rows]
