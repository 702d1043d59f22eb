"""What goes into a generation and what comes out of it, as a caller of the SDK sees it. Plain data, no protobuf."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from lookonce.images import ImageRef
from lookonce.videos import Video

Role: TypeAlias = Literal["system", "user", "assistant"]
FinishReason: TypeAlias = Literal["stop", "length", "abort"]
Part: TypeAlias = "str | ImageRef | Video | bytes | os.PathLike[str]"
"""One part of a message: a str is text; an image is a reference, bytes or a pathlib.Path."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: Role
    # Text, or texts, images and videos in their order.
    content: str | Sequence[Part]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. What is left out takes the model's default."""

    # Sampling; the ranges stand in the contract. temperature 0 is greedy.
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    # Length and ends.
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    # Alternatives per token; 0 is the sampled token only.
    logprobs: int
    # Structured output, where the server offers it.
    json_schema: str
    regex: str
    grammar: str
    # Of the request: its id in logs, lower priority runs earlier, isolation inside the prefix cache, LoRA adapter.
    request_id: str
    priority: int
    cache_salt: str
    adapter: str
    bypass_prefix_cache: bool
    # Longest time that the whole call may take, seconds. Default: the client's.
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Token accounting of one generation."""

    # All prompt tokens, image tokens included.
    prompt_tokens: int
    # Of these, served from the prefix KV cache.
    cached_prompt_tokens: int
    # Of the prompt, image tokens; the next three split them.
    image_tokens: int
    # Rows that had to be encoded for this request.
    encoded_image_tokens: int
    # Rows that came from the shared encoder cache.
    cached_image_tokens: int
    # Tokens that needed no row, since their KV was cached.
    skipped_image_tokens: int
    # Generated tokens.
    completion_tokens: int
    # From arrival to the first step that computed a token of it.
    queue_time_s: float
    # From arrival to the first generated token.
    time_to_first_token_s: float
    # Of the generated tokens, those that were guessed from the prompt and the answer, and were right.
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer."""

    text: str
    # Generated token ids.
    token_ids: tuple[int, ...]
    # "stop": end of sequence or a stop string; "length": max_tokens; "abort": aborted.
    finish_reason: FinishReason
    usage: Usage
    # The request's id, for logs and AbortRequest.
    request_id: str
    # Per generated token (token id, natural-log probability), the sampled one first; empty unless asked for.
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
