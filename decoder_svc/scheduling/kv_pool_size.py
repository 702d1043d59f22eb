"""How many KV blocks the pools have: what was asked for, else a share of the memory that the heaviest step leaves.

What is asked for are blocks of the full group. The sliding group gets what all running requests can hold at once, and
never more than the full group: its blocks are then no fewer than anybody needs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from decoder_svc.scheduling.kv_group import SlidingGroupSize
from lookonce.errors import ConfigurationError

logger = logging.getLogger(__name__)

_MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class KVPoolConfig:
    """What the operator says about the pool; the first that is given counts."""

    num_blocks: int | None
    memory_bytes: int | None
    # Of what the heaviest step leaves, 0..1.
    memory_share: float


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What blocks take of the memory."""

    # One block of the full group, over its layers.
    full_bytes: int
    # One block of the sliding group; 0 where the model has none.
    sliding_bytes: int = 0
    # Most blocks that the sliding group has use for.
    max_sliding_blocks: int = 0

    def pool_bytes(self, num_blocks: int) -> int:
        """What the pools take when the full group has so many blocks."""
        return num_blocks * self.full_bytes + min(num_blocks, self.max_sliding_blocks) * self.sliding_bytes

    def num_blocks_in(self, num_bytes: int) -> int:
        """The most blocks of the full group whose pools fit into so many bytes."""
        num_blocks = num_bytes // (self.full_bytes + self.sliding_bytes)
        if num_blocks < self.max_sliding_blocks:
            return num_blocks
        return (num_bytes - self.max_sliding_blocks * self.sliding_bytes) // self.full_bytes


def sliding_group_size(
    window: int, *, block_size: int, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int
) -> SlidingGroupSize:
    """The sliding group beside a full group of `num_blocks`.

    A request holds at most its window and a step's tokens at once, which begin and end inside a block.
    """
    per_request = -(-(window - 1 + max_num_batched_tokens) // block_size) + 1
    return SlidingGroupSize(window, min(num_blocks, max_num_seqs * per_request), per_request)


def num_kv_blocks(wish: KVPoolConfig, costs: BlockBytes, *, free_bytes: int, max_useful_blocks: int) -> int:
    """Blocks of the full group.

    `free_bytes` is the memory beside the heaviest step. `max_useful_blocks` bounds a pool that nobody has sized: all
    running requests at their longest.

    Raises ConfigurationError when not even two blocks fit. A pool larger than what is free is granted with a warning,
    for memory may be freed by others.
    """
    wanted_bytes = int(free_bytes * wish.memory_share) if wish.memory_bytes is None else wish.memory_bytes
    num_blocks = wish.num_blocks or costs.num_blocks_in(wanted_bytes)
    if wish.num_blocks is None and wish.memory_bytes is None:
        num_blocks = min(num_blocks, max_useful_blocks)
    if num_blocks < _MIN_BLOCKS:
        raise ConfigurationError(
            f"the KV pool may take {wanted_bytes} bytes and one block takes {costs.pool_bytes(1)}: there is no room "
            f"for {_MIN_BLOCKS} blocks; {free_bytes} bytes are free beside the heaviest step"
        )
    if costs.pool_bytes(num_blocks) > free_bytes:
        logger.warning(
            "the KV pool takes up to %d bytes, but beside the heaviest step only %d are free: lower "
            "kv_cache_memory_bytes or num_kv_blocks, or this process may be killed under load",
            costs.pool_bytes(num_blocks), free_bytes,
        )  # fmt: skip
    return num_blocks
