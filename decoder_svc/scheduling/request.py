"""One request and its progress through the scheduler.

Its images are tracked by row_demand.py, its KV blocks by kv_cache_manager.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request_output import FinishReason, RequestUsage
from decoder_svc.scheduling.sampling_params import SamplingParams, TokenConstraint

RequestId = NewType("RequestId", str)

BlockHash = NewType("BlockHash", bytes)
"""SHA-256 of a KV block's content and of everything before it, 32 bytes (block_hash.py)."""


class RequestState(enum.Enum):
    """The stage that a request has reached in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Conditions for sharing KV blocks between requests, in addition to equal tokens and images."""

    # Tenant and salt of the caller; requests share only if both are equal. Empty: the default tenant without a salt.
    salt: bytes = b""
    # Adapter that changes keys and values; None: the base model.
    adapter: str | None = None
    # Whether the request neither reads the prefix cache nor publishes its own blocks there.
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
        tenant: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        # The state of `params.constraint`; set before the request is added to a scheduler.
        self.constraint: TokenConstraint | None = None
        # Seconds on the monotonic clock.
        self.arrival_s = arrival_s
        # Latest useful time of the first token, on the same clock; None: no deadline.
        self.deadline_s = deadline_s
        # A lower value runs earlier.
        self.priority = priority
        # The requests of several tenants take turns.
        self.tenant = tenant
        # The place among those of the same priority; set by TenantTurns.
        self.turn = 0
        # Tokens that its tenant's answers had taken beyond what was expected of them, when it got its turn.
        self.surplus_before = 0
        # Whether running requests have given their places for this one: once only.
        self.has_claimed = False
        self.cache_scope = cache_scope
        # Number of prompt tokens, including image placeholders.
        self.num_prompt_tokens = len(prompt.token_ids)
        # The prompt's ids, then the generated ones.
        self.token_ids = list(prompt.token_ids)
        # Tokens behind them that the step in flight samples, 0 or 1: they can be scheduled before their ids are known.
        self.num_unknown_tokens = 0
        # The prompt has an image that an operator removed: blocks computed from now on are not published.
        self.is_private = False
        # Tokens whose keys and values are in the KV cache, or will be after the step in flight; catches up with
        # `num_tokens`.
        self.num_computed_tokens = 0
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        # Hashes of the full blocks, computed on demand by BlockHasher, which only ever appends.
        self.block_hashes: list[BlockHash] = []
        # Tokens before this index are in blocks that may be shared with other requests, so they are never written.
        self.num_shared_tokens = 0
        self.usage = RequestUsage(prompt_tokens=len(prompt.token_ids), image_tokens=prompt.num_image_tokens)

    @property
    def serving_order(self) -> tuple[int, int, float, RequestId]:
        """Sort key of everything that serves requests in turn: priority, then the tenant's turn, arrival, and id.

        The queue and the row cache must agree on it, also for equal arrivals: otherwise each of two requests can wait
        for the other one's rows.
        """
        return (self.priority, self.turn, self.arrival_s, self.request_id)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens, including one whose id is not known yet."""
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Ids of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def may_grow(self, max_context_tokens: int) -> bool:
        """Whether a further token may follow, should none of the unknown ones be a stop id."""
        num_tokens = len(self.token_ids) + self.num_unknown_tokens
        num_new_tokens = num_tokens - self.num_prompt_tokens
        has_room = num_tokens < max_context_tokens or self.params.num_context_tokens == 0
        return num_new_tokens < self.params.max_tokens and has_room

    def finish_reason_now(self, max_context_tokens: int) -> FinishReason | None:
        """Returns the reason why the latest generated token ends the request, or None if another token may follow."""
        if self.token_ids[-1] in self.params.stop_token_ids and self.num_output_tokens > self.params.min_tokens:
            return FinishReason.STOP
        return None if self.may_grow(max_context_tokens) else FinishReason.LENGTH

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
