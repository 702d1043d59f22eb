"""The limits of a step, and the smallest number of tokens that a step computes for a request."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.speculation import NO_SPECULATION, SpeculationLimits


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits that apply to every step."""

    # Tokens computed in one step.
    max_num_batched_tokens: int
    # Requests in the running batch.
    max_num_seqs: int
    # Prompt and generated tokens of one request.
    max_context_tokens: int
    # Embedding rows asked for in one step, except that one larger image is still asked for.
    max_num_rows_asked: int
    # Chunks do not depend on the cache or on other requests: prompts run block by block, then token by token.
    deterministic: bool = False
    # Smallest chunk before a row that has not arrived, at most one block (`MinimumChunk`).
    min_tokens_before_missing_row: int = 1
    # True: a prompt is computed up to its first missing row. False: only when none of its rows is in flight.
    overlap_encode: bool = True
    # Draft tokens added to decoding requests.
    speculation: SpeculationLimits = NO_SPECULATION


class MinimumChunk:
    """The rule for the smallest chunk of a request. Has no state."""

    def __init__(self, limits: SchedulerLimits, block_size: int) -> None:
        self._limits = limits
        self._block_size = block_size

    def num_tokens(self, request: Request, start: int) -> int:
        """Returns the fewest tokens from `start` on that a step computes; the rows of all of them must be present.

        A step reads all weights even for one token. A few tokens before a row that has not arrived are therefore
        computed later, together with the tokens behind that row. The configured minimum is at most one block. With
        more, a request could need more rows than the cache holds and wait for itself forever.
        """
        if self._limits.deterministic:
            return self._fixed(request, start)
        least = min(self._limits.min_tokens_before_missing_row, request.num_tokens - start)
        return request.prompt.first_cut(start, start + least) - start

    def _fixed(self, request: Request, start: int) -> int:
        """Returns the tokens of the only chunk that may begin at `start` in deterministic mode."""
        if start >= request.num_prompt_tokens:
            return 1
        return min((start // self._block_size + 1) * self._block_size, request.num_prompt_tokens) - start
