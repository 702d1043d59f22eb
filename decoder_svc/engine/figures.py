"""Limits, load and counters of the engine: the plain numbers that the gate, the wire and the metrics read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for the request gate, for routers and for autoscalers."""

    # Requests in the running batch.
    running_requests: int
    # Requests that wait for admission to the batch.
    waiting_requests: int
    # Requests whose next token needs an embedding row that has not arrived.
    waiting_for_embeddings: int
    # KV blocks in use divided by all blocks, 0..1.
    kv_cache_usage: float
    # Embedding rows held on the device.
    encoder_cache_rows: int
    # Mean duration of the latest steps, seconds; 0 before the first step.
    step_s: float = 0.0

    @property
    def live_requests(self) -> int:
        """Requests that have been submitted and have no terminal answer yet."""
        return self.running_requests + self.waiting_requests


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Sums since the engine started."""

    # Requests that were put back into the queue because the KV pool was full.
    preemptions: int
    # Tokens of admitted requests. A request that is admitted again after a preemption is not counted again.
    prefix_query_tokens: int
    # Those of them whose keys and values the prefix cache had.
    prefix_hit_tokens: int
    # Draft tokens that a step computed, and those of them that were accepted.
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    # Times that no request could advance, so that all were restarted.
    stalls: int = 0
    # Steps and images that failed for lack of memory.
    memory_errors: int = 0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capacity limits of the engine, fixed at start-up."""

    # Longest prompt plus completion, tokens.
    max_context_tokens: int
    # Tokens per KV block.
    block_size: int
    # KV blocks of the layers with full attention. Layers with a sliding window share them unless they have their own.
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
    # KV blocks of the layers with a sliding window; 0 where those layers have no blocks of their own.
    num_sliding_kv_blocks: int = 0
    # Snapshots of the states of recurrent layers; 0 for a model without such layers.
    num_state_snapshots: int = 0
    # Blocks between two of them.
    snapshot_interval: int = 0
    # States in front of the draft tokens of a step.
    num_draft_states: int = 0
