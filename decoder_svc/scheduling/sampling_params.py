"""The sampling parameters of a request, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters; defaults are already filled in."""

    # 0 is greedy.
    temperature: float = 0.0
    top_p: float = 1.0
    # None: no limit.
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # (token id, addend) pairs.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Budget of generated tokens.
    max_tokens: int = 256
    # No end of sequence and no stop id before this many tokens.
    min_tokens: int = 0
    # End-of-sequence ids of the model (empty with ignore_eos) and the request's own stop ids.
    stop_token_ids: frozenset[int] = frozenset()
    # None: drawn by the server.
    seed: int | None = None
    # Alternatives reported per generated token; 0: the sampled token's only; None: no log probabilities.
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0
