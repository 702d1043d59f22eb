"""One row of logits to sample from: its parameters, its preceding tokens and its request's state."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.runner.sampling.sampling_state import IntArray, SamplingState, TokenCounts
from decoder_svc.scheduling.sampling_params import SamplingParams


# The class is not frozen: each step makes one object for each request, and a frozen one takes several times as long.
@dataclass(slots=True)
class SampleRow:
    """Sampling parameters and preceding tokens of one row of logits. Nobody changes one."""

    params: SamplingParams
    # Prompt, generated and draft ids, [num_tokens].
    token_ids: IntArray
    num_prompt_tokens: int
    # The request's own, the same object in each step.
    state: SamplingState
    # Draft tokens at the end of `token_ids`, which may be dropped after this step.
    num_drafts: int = 0
    # The tokens that may come next, as TokenConstraint.masks returns them; None: any.
    mask: bytes | None = None
    # Number of the likeliest tokens that are reported in their order, from which a constraint chooses.
    num_likeliest: int = 0
    # Whether the host knows all of `token_ids`; otherwise the last one is 0 here, and only the device has it.
    is_known: bool = True

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens already generated: the index of the next one in the answer."""
        return len(self.token_ids) - self.num_prompt_tokens

    def counts(self) -> tuple[IntArray, IntArray]:
        """Returns the distinct preceding tokens and their numbers of occurrences in the output."""
        # Drafts may be dropped, so they are not counted in the request's own counts.
        counts = TokenCounts(self.num_prompt_tokens) if self.num_drafts else self.state.counts
        return counts.update(self.token_ids)
