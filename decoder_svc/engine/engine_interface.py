"""What the servicer needs of an engine: submit, read outputs, abort, and figures for routers. No torch, no gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import CacheScope, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput
from decoder_svc.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for routers and autoscalers."""

    # Requests in the running batch.
    running_requests: int
    # Requests that wait for admission.
    waiting_requests: int
    # Of those, held back by an embedding that has not arrived.
    waiting_for_embeddings: int
    # KV blocks in use over all blocks, 0..1.
    kv_cache_usage: float
    # Embedding rows resident on the device.
    encoder_cache_rows: int
    # Of the latest steps, seconds; 0 before the first.
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What has happened since the start."""

    # Requests that were put back into the queue because the KV pool was full.
    preemptions: int
    # Tokens of admitted requests, and how many of them the prefix cache had; admissions after a preemption apart.
    prefix_query_tokens: int
    prefix_hit_tokens: int
    # Tokens that were guessed and computed, and how many of them were right.
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can hold; fixed once it runs."""

    # Longest prompt plus completion, tokens.
    max_context_tokens: int
    # Tokens per KV block.
    block_size: int
    # KV blocks of the layers that see everything, or all.
    num_kv_blocks: int
    # Tokens computed in one step.
    max_batched_tokens: int
    # Requests in the running batch.
    max_running_requests: int
    # Embedding rows that one step may ask for.
    encoder_compute_budget_rows: int
    # Embedding rows held on the device.
    encoder_cache_size_rows: int
    # Rows of the largest possible image.
    max_rows_per_image: int
    # KV blocks of the layers with a sliding window, where they have blocks of their own.
    num_sliding_kv_blocks: int = 0


class OutputStream(Protocol):
    """Outputs of one request, read on the event loop.

    The first output is the admission: no tokens, prompt-side usage. The last one has a finish reason. A request that
    fails raises its LookonceError instead. Outputs are coalesced when the reader is behind.
    """

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """The outputs in order."""
        ...

    @property
    def ended_s(self) -> float | None:
        """When the last output was given, monotonic clock, seconds, whether or not it has been read; None: not yet."""
        ...

    def when_ended(self, action: Callable[[], None]) -> None:
        """Calls `action` once, at that moment."""
        ...


class Engine(Protocol):
    """The engine as its clients see it; every method may be called on the event loop and returns at once."""

    @property
    def limits(self) -> EngineLimits:
        """What fits."""
        ...

    @property
    def attention_backend(self) -> str:
        """What computes attention, one of a few names."""
        ...

    def submit(
        self,
        request_id: RequestId,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int,
        deadline_s: float | None,
        cache_scope: CacheScope,
    ) -> OutputStream:
        """Queues a request. `deadline_s` is on the monotonic clock; None is no deadline.

        Raises OverloadedError when the queue is full and ContextTooLongError when the request could never run.
        """
        ...

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request in whatever state it is and frees what it holds; its last output has this reason.

        Unknown and ended ids are ignored.
        """
        ...

    def load(self) -> EngineLoad:
        """Figures of this moment."""
        ...

    def counters(self) -> EngineCounters:
        """Sums so far."""
        ...
