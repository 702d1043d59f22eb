"""The engine's answer to a request: new tokens, log probabilities, finish reason, token accounting."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """The reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class RequestUsage:
    """Token accounting of one request. Field names match the `Usage` message of the gRPC API."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    image_tokens: int = 0
    cached_image_tokens: int = 0
    encoded_image_tokens: int = 0
    skipped_image_tokens: int = 0
    completion_tokens: int = 0
    accepted_draft_tokens: int = 0
    queue_time_s: float = 0.0
    time_to_first_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural logarithm) at one generated position. The first has what the prompt gave as well."""

    # (token id, log probability), the sampled token first.
    top: tuple[tuple[int, float], ...]
    # The pooled hidden state of the prompt; empty unless asked for.
    embedding: tuple[float, ...] = ()
    # The same as `top` for each token of the prompt but the first, with nothing for those of images; empty unless asked
    # for.
    prompt: tuple[tuple[tuple[int, float], ...], ...] = ()


# The class is not frozen: each step makes one object for each request, and a frozen one takes several times as long.
@dataclass(slots=True)
class RequestOutput:
    """A request's progress since its previous output. Several steps are merged into one output for a slow reader.

    Nobody changes one.
    """

    # Newly generated ids; empty in the first output (admission) and possibly in the last.
    token_ids: tuple[int, ...]
    # One per new token if the request asked for them, else empty.
    logprobs: tuple[TokenLogprobs, ...]
    # Set in the last output only.
    finish_reason: FinishReason | None
    # A copy taken with this output. None: since the previous output, only tokens of the answer have been added.
    usage: RequestUsage | None
    # For each new token, whether it was an accepted draft token; empty if none was.
    was_draft: tuple[bool, ...] = ()
