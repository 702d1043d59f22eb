"""Block tables and the prefix cache: which KV blocks hold which request's tokens, and what need not be computed again.

A block can be found as soon as the chunk that fills it is scheduled, thus by requests behind it in the same step: an
attention backend writes a layer's keys and values of the whole step before any of its queries look, and a chunk that is
scheduled is computed in that step or the step fails as a whole; then the names are withdrawn with the requests.

A block that was found is never written: of a prompt that is in the cache to its last token that token is computed again
for its logits, and its keys and values go nowhere (`ScheduledChunk.write_start`), for the shared block has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decoder_svc.block_hash import BlockHasher
from decoder_svc.block_pool import BlockEvent, BlockPool
from decoder_svc.request import Request, RequestId


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest prefix of a request that is in the cache."""

    # In token order.
    block_ids: tuple[int, ...]
    # Tokens that need no computing. At least one token is left to compute, if need be the last of the last block.
    num_tokens: int


NO_HIT = PrefixHit((), 0)


@dataclass(slots=True)
class PrefixCacheStats:
    """How often the cache was asked, and what it had, in tokens. Counted once per admission."""

    num_queries: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    # Admissions after a preemption, which mostly find their own blocks: kept apart.
    num_preempted_queries: int = 0
    num_preempted_query_tokens: int = 0
    num_preempted_hit_tokens: int = 0


class KVCacheManager:
    """Maps requests to blocks of `block_size` tokens. Questions never change state."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        deployment: bytes = b"",
        is_shared: bool = True,
        deterministic: bool = False,
        on_event: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        """Without `is_shared` there is no prefix cache: nothing is hashed, published or found.

        `deterministic` shares only what is computed block by block: whole blocks of prompts.

        `deployment` tells apart what must never share blocks, see BlockHasher.
        """
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, on_event)
        self.hasher = BlockHasher(block_size, deployment)
        self.stats = PrefixCacheStats()
        self._is_shared = is_shared
        self._deterministic = deterministic
        self._block_tables: dict[RequestId, list[int]] = {}
        # Blocks of each table, from its start, that were found or have been published.
        self._num_named: dict[RequestId, int] = {}
        # Blocks of each table, from its start, that the runner knows.
        self._num_told: dict[RequestId, int] = {}

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0..1; what is only kept in case is not in use."""
        return self.pool.usage

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of a request that has no blocks yet."""
        if not self._may_share(request):
            return NO_HIT
        return self._find_from(request, 0)

    def may_find_more(self, request: Request) -> bool:
        """Whether a whole block of known tokens lies ahead of the request; false while it decodes."""
        return (request.num_tokens - 1) // self.block_size > request.num_computed_tokens // self.block_size

    def find_more(self, request: Request) -> PrefixHit:
        """What others have computed meanwhile of a request that is in the middle of its prompt, beyond its own tokens.

        NO_HIT unless that is at least one whole block; else the blocks from that of the next token on.
        """
        if not self._may_share(request):
            return NO_HIT
        hit = self._find_from(request, request.num_computed_tokens // self.block_size)
        return hit if hit.num_tokens > request.num_computed_tokens else NO_HIT

    def adopt(self, request: Request, hit: PrefixHit) -> None:
        """Puts the blocks of `find_more` in the place of the request's own from the same index on."""
        table = self._block_tables[request.request_id]
        index = request.num_computed_tokens // self.block_size
        own = table[index:]
        self.pool.hold(hit.block_ids)
        table[index:] = hit.block_ids
        self._num_told[request.request_id] = min(index, self._num_told[request.request_id])
        self._num_named[request.request_id] = len(table)
        self.pool.release(own)

    def num_blocks_for_admission(self, request: Request, hit: PrefixHit) -> int:
        """Free blocks that admitting the request with all its tokens takes.

        Blocks of the hit that somebody holds cost nothing, those that are free cost themselves, once.
        """
        num_blocks = -(-request.num_tokens // self.block_size)
        return num_blocks - len(hit.block_ids) + sum(self.pool.is_free(block) for block in hit.block_ids)

    def can_admit(self, request: Request, hit: PrefixHit) -> bool:
        """Whether all known tokens of the request fit beside what is held."""
        return self.num_blocks_for_admission(request, hit) <= self.pool.num_free_blocks

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Holds the blocks of the hit for the request; they are its block table from now on."""
        assert request.request_id not in self._block_tables, "a request was admitted twice"
        self.pool.hold(hit.block_ids)
        self._block_tables[request.request_id] = list(hit.block_ids)
        self._num_named[request.request_id] = len(hit.block_ids)
        self._num_told[request.request_id] = 0
        self._count(request, hit)

    def num_blocks_missing(self, request: Request, num_new_tokens: int) -> int:
        """Blocks that `allocate` would take so that `num_new_tokens` more tokens have a slot."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_blocks = -(-num_tokens // self.block_size)
        return max(0, num_blocks - len(self._block_tables[request.request_id]))

    def can_allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Whether the pool has the blocks for `num_new_tokens` more tokens."""
        return self.num_blocks_missing(request, num_new_tokens) <= self.pool.num_free_blocks

    def allocate(self, request: Request, num_new_tokens: int) -> None:
        """Gives the request slots for `num_new_tokens` more tokens. The caller has asked `can_allocate`."""
        new_blocks = self.pool.allocate(self.num_blocks_missing(request, num_new_tokens))
        self._block_tables[request.request_id].extend(new_blocks)

    def take_table_changes(self, request_id: RequestId) -> tuple[int, tuple[int, ...]]:
        """(index, blocks): what has changed in the block table since the last call, which is all from `index` on."""
        table = self._block_tables[request_id]
        start = self._num_told[request_id]
        self._num_told[request_id] = len(table)
        return start, tuple(table[start:])

    def publish(self, request: Request, num_tokens: int) -> list[int]:
        """Lets others find the full blocks of the first `num_tokens` tokens; returns those that got their name now.

        Call it when these tokens are computed, or scheduled in the step in hand.
        """
        if not self._is_shared or request.is_private:
            return []
        if self._deterministic:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        num_full = num_tokens // self.block_size
        num_named = self._num_named[request.request_id]
        if num_named >= num_full:
            return []
        self.hasher.extend(request)
        blocks = self._block_tables[request.request_id][num_named:num_full]
        for block, block_hash in zip(blocks, request.block_hashes[num_named:num_full], strict=True):
            self.pool.publish(block, block_hash)
        self._num_named[request.request_id] = num_full
        return blocks

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Takes names back that `publish` gave in a step that failed."""
        self.pool.withdraw(blocks)

    def num_shared_tokens(self, request_id: RequestId) -> int:
        """Tokens at the start of the request whose blocks have a name: others may read them, nobody may write."""
        return self._num_named[request_id] * self.block_size

    def holds_any(self, request_id: RequestId, blocks: Iterable[int]) -> bool:
        """Whether any of these blocks is in the request's table."""
        return not set(blocks).isdisjoint(self._block_tables[request_id])

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """The request's blocks in token order."""
        return tuple(self._block_tables.get(request_id, ()))

    def free(self, request_id: RequestId) -> None:
        """Gives all blocks of a request back; a request without blocks is fine."""
        self.pool.release(self._block_tables.pop(request_id, []))
        self._num_named.pop(request_id, None)
        self._num_told.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        """Forgets what is cached; running requests go on and publish what they compute from now on."""
        self.pool.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError when tables and pool disagree."""
        self.pool.check_integrity(self._block_tables.values())

    def _may_share(self, request: Request) -> bool:
        return self._is_shared and not request.cache_scope.bypass

    def _find_from(self, request: Request, index: int) -> PrefixHit:
        """The longest run of cached blocks from block `index` on; `num_tokens` counts from the prompt's start."""
        self.hasher.extend(request)
        blocks: list[int] = []
        for block_hash in request.block_hashes[index:]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        num_tokens = (index + len(blocks)) * self.block_size
        if blocks and num_tokens == request.num_tokens:
            if self._deterministic:
                blocks.pop()
                num_tokens -= self.block_size
            else:
                num_tokens -= 1
        return PrefixHit(tuple(blocks), num_tokens) if blocks else NO_HIT

    def _count(self, request: Request, hit: PrefixHit) -> None:
        stats = self.stats
        if request.num_preemptions:
            stats.num_preempted_queries += 1
            stats.num_preempted_query_tokens += request.num_tokens
            stats.num_preempted_hit_tokens += hit.num_tokens
        else:
            stats.num_queries += 1
            stats.num_query_tokens += request.num_tokens
            stats.num_hit_tokens += hit.num_tokens
