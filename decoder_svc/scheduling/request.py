"""One request and its progress through the scheduler."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request_output import FinishReason, RequestUsage
from decoder_svc.scheduling.sampling_params import SamplingParams

RequestId = NewType("RequestId", str)

BlockHash = NewType("BlockHash", bytes)
"""The name of a KV block by what it holds: SHA-256, 32 bytes (block_hash.py)."""


class RequestState(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class CacheScope:
    """With whom a request shares KV blocks, beyond having the same tokens and images."""

    # Tenant and salt of the caller; requests with different ones never share. Empty: the default tenant, no salt.
    salt: bytes = b""
    # Adapter that changes keys and values; None: the base model.
    adapter: str | None = None
    # Neither look for cached blocks nor let others find what is computed.
    bypass: bool = False


DEFAULT_SCOPE = CacheScope()


class Request:
    """The scheduler's record of one request. Only the engine thread touches it after submission."""

    def __init__(
        self,
        request_id: RequestId,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_s: float,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_scope: CacheScope = DEFAULT_SCOPE,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        # Monotonic clock, seconds.
        self.arrival_s = arrival_s
        self.deadline_s = deadline_s
        # Lower runs earlier.
        self.priority = priority
        self.cache_scope = cache_scope
        # Prompt, then generated.
        self.token_ids = list(prompt.token_ids)
        # Shows an image that is to be forgotten: its blocks get no names any more.
        self.is_private = False
        # Tokens whose KV is in the cache; catches up with len(token_ids).
        self.num_computed_tokens = 0
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        # Of the full blocks, as far as anybody needed them; extended by BlockHasher only, never computed again.
        self.block_hashes: list[BlockHash] = []
        # Keys and values of tokens before this index are in blocks that were found: others' too, never to be written.
        self.num_shared_tokens = 0
        self.usage = RequestUsage(prompt_tokens=len(prompt.token_ids), image_tokens=prompt.num_image_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, image placeholders included."""
        return len(self.prompt.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - len(self.prompt.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Generated ids."""
        return self.token_ids[self.num_prompt_tokens :]

    def finish_reason_now(self, max_context_tokens: int) -> FinishReason | None:
        """Why the latest generated token is the last; None when another may follow."""
        if self.token_ids[-1] in self.params.stop_token_ids and self.num_output_tokens >= self.params.min_tokens:
            return FinishReason.STOP
        if self.num_output_tokens >= self.params.max_tokens or self.num_tokens >= max_context_tokens:
            return FinishReason.LENGTH
        return None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
