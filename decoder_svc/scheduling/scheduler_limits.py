"""The limits of a step, and the numbers of tokens that a step may compute for a request."""

from __future__ import annotations

from collections.abc import Sequence
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
    # Smallest chunk before a row that has not arrived, at most one block (`ChunkSize`).
    min_tokens_before_missing_row: int = 1
    # True: a prompt is computed up to its first missing row. False: only when none of its rows is in flight.
    overlap_encode: bool = True
    # Draft tokens added to decoding requests.
    speculation: SpeculationLimits = NO_SPECULATION


class ChunkSize:
    """The smallest and the largest chunk of a request. Has no state."""

    def __init__(self, limits: SchedulerLimits, block_size: int) -> None:
        self._limits = limits
        self._block_size = block_size

    def least(self, request: Request, start: int) -> int:
        """Returns the fewest tokens from `start` on that a step computes; the rows of all of them must be present.

        A step reads all weights even for one token. A few tokens before a row that has not arrived are therefore
        computed later, together with the tokens behind that row. The configured minimum is at most one block. With
        more, a request could need more rows than the cache holds and wait for itself forever.
        """
        if self._limits.deterministic:
            return self._fixed(request, start)
        least = min(self._limits.min_tokens_before_missing_row, request.num_tokens - start)
        return request.prompt.first_cut(start, start + least) - start

    def most(self, request: Request, start: int, stop: int) -> int:
        """Returns the most tokens from `start` on that end at `stop` or before; 0 if a chunk cannot end there."""
        num_tokens = request.prompt.last_cut(start, stop) - start
        if not self._limits.deterministic:
            return num_tokens
        fixed = self._fixed(request, start)
        return fixed if fixed <= num_tokens else 0

    def beside_answers(self, request: Request, num_tokens: int, token_budget: int, behind: Sequence[Request]) -> int:
        """Returns how much of a chunk of `num_tokens` leaves one token for each request `behind` that decodes.

        Otherwise their answers would pause until the prompt is computed. An uncuttable span still takes what it needs.
        """
        num_decoding = sum(other.num_computed_tokens == other.num_tokens - 1 for other in behind)
        start = request.num_computed_tokens
        num_left = max(0, token_budget - num_decoding)
        return self.most(request, start, start + min(num_tokens, num_left)) or num_tokens

    def _fixed(self, request: Request, start: int) -> int:
        """Returns the tokens of the only chunk that may begin at `start` in deterministic mode."""
        if start >= request.num_prompt_tokens:
            return 1
        return min((start // self._block_size + 1) * self._block_size, request.num_prompt_tokens) - start
