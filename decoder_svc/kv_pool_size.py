"""How many KV blocks the pool has: what was asked for, else a share of the memory that the heaviest step leaves."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lookonce.errors import ConfigurationError

logger = logging.getLogger(__name__)

_MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class KVPoolWish:
    """What the operator says about the pool; the first that is given counts."""

    num_blocks: int | None
    memory_bytes: int | None
    # Of what the heaviest step leaves, 0..1.
    memory_share: float


def num_kv_blocks(wish: KVPoolWish, *, block_bytes: int, free_bytes: int, max_useful_blocks: int) -> int:
    """Blocks of the pool.

    `free_bytes` is the memory beside the heaviest step. `max_useful_blocks` bounds a pool that nobody has sized: all
    running requests at their longest.

    Raises ConfigurationError when not even two blocks fit. A pool larger than what is free is granted with a warning,
    for memory may be freed by others.
    """
    wanted_bytes = int(free_bytes * wish.memory_share) if wish.memory_bytes is None else wish.memory_bytes
    num_blocks = wish.num_blocks or wanted_bytes // block_bytes
    if wish.num_blocks is None and wish.memory_bytes is None:
        num_blocks = min(num_blocks, max_useful_blocks)
    if num_blocks < _MIN_BLOCKS:
        raise ConfigurationError(
            f"the KV pool may take {wanted_bytes} bytes and one block takes {block_bytes}: there is no room for "
            f"{_MIN_BLOCKS} blocks; {free_bytes} bytes are free beside the heaviest step"
        )
    if num_blocks * block_bytes > free_bytes:
        logger.warning(
            "the KV pool takes up to %d bytes, but beside the heaviest step only %d are free: lower "
            "kv_cache_memory_bytes or num_kv_blocks, or this process may be killed under load",
            num_blocks * block_bytes, free_bytes,
        )  # fmt: skip
    return num_blocks
