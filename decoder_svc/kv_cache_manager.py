"""Block tables: which KV blocks hold which request's tokens."""

from __future__ import annotations

from decoder_svc.block_pool import BlockPool
from decoder_svc.request import Request, RequestId


class KVCacheManager:
    """Maps requests to blocks of `block_size` tokens. Questions never change state."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._block_tables: dict[RequestId, list[int]] = {}

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0..1."""
        return self.pool.usage

    def num_blocks_missing(self, request: Request, num_new_tokens: int) -> int:
        """Blocks that `allocate` would take so that `num_new_tokens` more tokens have a slot."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_blocks = -(-num_tokens // self.block_size)
        return max(0, num_blocks - len(self._block_tables.get(request.request_id, ())))

    def can_allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Whether the pool has the blocks for `num_new_tokens` more tokens."""
        return self.num_blocks_missing(request, num_new_tokens) <= self.pool.num_free_blocks

    def allocate(self, request: Request, num_new_tokens: int) -> list[int]:
        """Gives the request slots for `num_new_tokens` more tokens; returns the blocks that are new to it."""
        new_blocks = self.pool.allocate(self.num_blocks_missing(request, num_new_tokens))
        self._block_tables.setdefault(request.request_id, []).extend(new_blocks)
        return new_blocks

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """The request's blocks in token order."""
        return tuple(self._block_tables.get(request_id, ()))

    def free(self, request_id: RequestId) -> None:
        """Gives all blocks of a request back; a request without blocks is fine."""
        self.pool.free(self._block_tables.pop(request_id, []))

    def check_integrity(self) -> None:
        """Raises AssertionError when tables and pool disagree."""
        self.pool.check_integrity(self._block_tables.values())
