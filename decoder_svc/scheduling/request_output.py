"""The engine's answer to a request: new tokens, log probabilities, finish reason, token accounting."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why a request ended with an answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class RequestUsage:
    """Token accounting of one request; the words are those of the wire contract's Usage."""

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
    """Natural-log probabilities at one generated position: (token id, logprob), the sampled token first."""

    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What happened to a request since the previous output; several steps are coalesced when its reader is behind."""

    # Newly generated ids; empty in the first output (admission) and possibly in the last.
    token_ids: tuple[int, ...]
    # One per new token where they were asked for, else empty.
    logprobs: tuple[TokenLogprobs, ...]
    # Set in exactly one output, the last.
    finish_reason: FinishReason | None
    # A snapshot.
    usage: RequestUsage
    # Of each new token whether it was guessed before it was sampled; empty: none was.
    was_draft: tuple[bool, ...] = ()
