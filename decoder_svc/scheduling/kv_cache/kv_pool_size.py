"""The size of the KV pools: as configured, else a share of the memory that is free during the heaviest step.

The configured number is that of the full-attention group. The sliding-window group gets as many blocks as all running
requests can hold at once, but never more than the full group, so it is never the bottleneck. Snapshots of recurrent
layers take their part of the memory first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from decoder_svc.scheduling.kv_cache.kv_group import SlidingGroupSize
from decoder_svc.scheduling.kv_cache.state_group import StateGroupSize
from decoder_svc.scheduling.window import Window
from lookonce.errors import ConfigurationError

logger = logging.getLogger(__name__)

_MIN_BLOCKS = 2

# Most tokens between two snapshots of recurrent layers. A cached prefix is computed again from the last snapshot on, so
# this bounds what is computed twice; it is a small part of a usual step.
_MAX_INTERVAL_TOKENS = 256
# Snapshots that take more than this part of the keys and values of their interval are dear: the state of a gated delta
# net is as large as the keys and values of a thousand tokens or more. Of those, so many for each request that may run
# are worth more than blocks. The states of short convolutions are as large as those of a few tokens.
_CHEAP_PART = 2
_DEAR_SNAPSHOTS_PER_REQUEST = 4
# The largest parts of the pools' memory that snapshots, and the states in front of drafts, take.
_SNAPSHOT_PART, _DRAFT_PART = 4, 16
# Requests that may have all of their draft tokens in one step, where states are dear: drafts pay while few run.
_REQUESTS_WITH_DEAR_DRAFTS = 2


@dataclass(frozen=True, slots=True)
class KVPoolConfig:
    """The operator's settings for the pool's size; the first one that is set applies."""

    num_blocks: int | None
    memory_bytes: int | None
    # Share of the memory that is free during the heaviest step, 0..1.
    memory_share: float


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Memory taken by one block of each group."""

    # Bytes of one block of the full group, over all its layers.
    full_bytes: int
    # Bytes of one block of the sliding group; 0 if the model has none.
    sliding_bytes: int = 0
    # Most blocks that the sliding group can use.
    max_sliding_blocks: int = 0
    # Bytes of all snapshots of recurrent layers; 0 if the model has no such layers.
    snapshot_bytes: int = 0

    def pool_bytes(self, num_blocks: int) -> int:
        """Returns the memory of all pools if the full group has `num_blocks` blocks."""
        return (
            self.snapshot_bytes
            + num_blocks * self.full_bytes
            + min(num_blocks, self.max_sliding_blocks) * self.sliding_bytes
        )

    def num_blocks_in(self, num_bytes: int) -> int:
        """Returns the largest number of blocks of the full group for which all pools fit into `num_bytes`."""
        num_bytes = max(0, num_bytes - self.snapshot_bytes)
        num_blocks = num_bytes // (self.full_bytes + self.sliding_bytes)
        if num_blocks < self.max_sliding_blocks:
            return num_blocks
        return (num_bytes - self.max_sliding_blocks * self.sliding_bytes) // self.full_bytes


def sliding_group_size(
    window: Window, *, block_size: int, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int
) -> SlidingGroupSize:
    """Returns the size of the sliding group for a full group of `num_blocks` blocks.

    A request holds at most its window, or a chunk, and one step's tokens. Both may begin and end inside a block, which
    adds one.
    """
    per_request = -(-(window.size - 1 + max_num_batched_tokens) // block_size) + 1
    return SlidingGroupSize(window, min(num_blocks, max_num_seqs * per_request), per_request)


@dataclass(frozen=True, slots=True)
class StateCosts:
    """Memory of a model with recurrent layers."""

    # Bytes of one state, and of one block of keys and values, over all their layers.
    state_bytes: int
    block_bytes: int
    # Tokens of a block.
    block_size: int

    @property
    def interval(self) -> int:
        """Blocks between two snapshots: the fewest for which snapshots are cheap, but 256 tokens at most."""
        fewest = -(-_CHEAP_PART * self.state_bytes // self.block_bytes)
        return max(1, min(_MAX_INTERVAL_TOKENS // self.block_size, fewest))

    @property
    def are_cheap(self) -> bool:
        """Whether a snapshot takes a small part of the memory of its interval's keys and values."""
        return _CHEAP_PART * self.state_bytes <= self.interval * self.block_bytes


def state_group_size(
    wish: KVPoolConfig,
    costs: StateCosts,
    *,
    free_bytes: int,
    max_num_seqs: int,
    max_useful_blocks: int,
    num_draft_tokens: int = 0,
) -> StateGroupSize:
    """Returns the size of the group of recurrent layers.

    `free_bytes` and `max_useful_blocks` are those of `num_kv_blocks`. `num_draft_tokens` are those of a request in a
    step.
    """
    pool_bytes = int(free_bytes * wish.memory_share) if wish.memory_bytes is None else wish.memory_bytes
    useful = _DEAR_SNAPSHOTS_PER_REQUEST * max_num_seqs
    if costs.are_cheap:
        useful = max(useful, max_useful_blocks // costs.interval)
    num_snapshots = max(1, min(useful, pool_bytes // _SNAPSHOT_PART // costs.state_bytes))
    num_drafting = max_num_seqs if costs.are_cheap else min(max_num_seqs, _REQUESTS_WITH_DEAR_DRAFTS)
    num_draft_states = min(num_draft_tokens * num_drafting, pool_bytes // _DRAFT_PART // costs.state_bytes)
    return StateGroupSize(max_num_seqs, num_snapshots, costs.interval, num_draft_states)


def num_kv_blocks(wish: KVPoolConfig, costs: BlockBytes, *, free_bytes: int, max_useful_blocks: int) -> int:
    """Returns the number of blocks of the full group.

    Args:
        free_bytes: Memory that is free during the heaviest step.
        max_useful_blocks: Blocks of all running requests at their longest. It bounds the default size only.

    Raises ConfigurationError if fewer than two blocks fit. A configured pool larger than the free memory is granted
    with a warning, because other processes may free memory.
    """
    wanted_bytes = int(free_bytes * wish.memory_share) if wish.memory_bytes is None else wish.memory_bytes
    num_blocks = wish.num_blocks or costs.num_blocks_in(wanted_bytes)
    if wish.num_blocks is None and wish.memory_bytes is None:
        num_blocks = min(num_blocks, max_useful_blocks)
    if num_blocks < _MIN_BLOCKS:
        raise ConfigurationError(
            f"the KV pool may take {wanted_bytes} bytes and one block takes {costs.pool_bytes(1)}: there is no room "
            f"for {_MIN_BLOCKS} blocks; {free_bytes} bytes are free during the heaviest step"
        )
    if costs.pool_bytes(num_blocks) > free_bytes:
        logger.warning(
            "the KV pool takes up to %d bytes, but only %d are free during the heaviest step: lower "
            "kv_cache_memory_bytes or num_kv_blocks, or this process may be killed under load",
            costs.pool_bytes(num_blocks), free_bytes,
        )  # fmt: skip
    return num_blocks
