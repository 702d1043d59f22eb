"""How many tokens of a request are the fewest that a step computes."""

from __future__ import annotations

from decoder_svc.scheduling.request import Request


class MinimumChunk:
    """The rule; without state."""

    def __init__(self, block_size: int, min_tokens_before_missing_row: int, *, deterministic: bool) -> None:
        """See SchedulerLimits."""
        self._block_size = block_size
        self._min_tokens_before_missing_row = min_tokens_before_missing_row
        self._deterministic = deterministic

    def num_tokens(self, request: Request, start: int) -> int:
        """Tokens from `start` on without whose rows the request does not go on.

        A step reads all weights for however few tokens: before a row that has not arrived, a few are better computed
        with what follows. No more than the rows of a block, or a request could hold more rows than are kept beside the
        largest image, and wait for itself.
        """
        if self._deterministic:
            return self._fixed(request, start)
        least = min(self._min_tokens_before_missing_row, request.num_tokens - start)
        return request.prompt.first_cut(start, start + least) - start

    def _fixed(self, request: Request, start: int) -> int:
        """Tokens of the only chunk that may begin at `start` in deterministic mode."""
        if start >= request.num_prompt_tokens:
            return 1
        return min((start // self._block_size + 1) * self._block_size, request.num_prompt_tokens) - start
