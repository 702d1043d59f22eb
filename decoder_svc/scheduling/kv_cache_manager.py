"""Block tables and the prefix cache: which KV blocks hold which request's tokens, and what need not be computed again.

A block can be found as soon as the chunk that fills it is scheduled, thus by requests behind it in the same step: an
attention backend writes a layer's keys and values of the whole step before any of its queries look, and a chunk that is
scheduled is computed in that step or the step fails as a whole; then the names are withdrawn with the requests.

A block that was found is never written: of a prompt that is in the cache to its last token that token is computed again
for its logits, and its keys and values go nowhere (`ScheduledChunk.write_start`), for the shared block has them.

Layers with a sliding window have a group of their own (kv_group.py), which lets go of what nobody sees any more. A
prefix is only in the cache where both groups have what the next token looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.scheduling.block_hash import BlockHasher
from decoder_svc.scheduling.block_pool import BlockPool
from decoder_svc.scheduling.kv_group import KVGroup, SlidingGroupSize
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.scheduler_output import SlidingTable


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest prefix of a request that is in the cache."""

    # Of the layers that see everything, in token order.
    block_ids: tuple[int, ...]
    # Tokens that need no computing. At least one token is left to compute, if need be the last of the last block.
    num_tokens: int
    # Of the layers with a sliding window: the last ones of the same stretch, as far back as the next token looks.
    sliding_block_ids: tuple[int, ...] = ()


NO_HIT = PrefixHit((), 0)


@dataclass(slots=True)
class PrefixCacheStats:
    """How often the cache was asked, and what it had, in tokens. Counted once per admission."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


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
        sliding: SlidingGroupSize | None = None,
    ) -> None:
        """Without `is_shared` there is no prefix cache: nothing is hashed, published or found.

        `deterministic` shares only what is computed block by block: whole blocks of prompts.

        `deployment` tells apart what must never share blocks, see BlockHasher.

        `num_blocks` is the full group's; `sliding` None: all layers are in that.
        """
        self.block_size = block_size
        self.hasher = BlockHasher(block_size, deployment)
        self.stats = PrefixCacheStats()
        self._is_shared = is_shared
        self._deterministic = deterministic
        self._full = KVGroup(num_blocks, block_size)
        # Of the layers that see everything.
        self.pool = self._full.pool
        self._sliding = None if sliding is None else _sliding_group(sliding, block_size)
        self._groups = [self._full] if self._sliding is None else [self._full, self._sliding]
        # Blocks of each table, from its start, that were found or have been published.
        self._num_published: dict[RequestId, int] = {}

    @property
    def sliding_pool(self) -> BlockPool | None:
        """Of the layers with a sliding window, where the model has some."""
        return None if self._sliding is None else self._sliding.pool

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks in use in the fuller group, 0..1; what is only kept in case is not in use."""
        return max(group.pool.usage for group in self._groups)

    @property
    def version(self) -> int:
        """Changes whenever `find_prefix` may answer differently."""
        return self.pool.version + (0 if self._sliding is None else self._sliding.pool.version)

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
        index = request.num_computed_tokens // self.block_size
        stop = index + len(hit.block_ids)
        self._full.adopt(request.request_id, index, hit.block_ids, stop)
        if self._sliding is not None:
            self._sliding.adopt(request.request_id, index, hit.sliding_block_ids, stop)
            self._release_unseen(self._sliding, request, hit.num_tokens)
        self._num_published[request.request_id] = stop

    def num_blocks_for_admission(self, request: Request, hit: PrefixHit) -> int:
        """Free blocks that admitting the request with all its tokens takes from the full group."""
        return self._full.num_blocks_for_admission(self._num_new_blocks(request, hit), hit.block_ids)

    def can_admit(self, request: Request, hit: PrefixHit) -> bool:
        """Whether all known tokens of the request fit beside what is held."""
        if self.num_blocks_for_admission(request, hit) > self.pool.num_free_blocks:
            return False
        if self._sliding is None:
            return True
        num_blocks = self._sliding.num_blocks_for_admission(self._num_new_blocks(request, hit), hit.sliding_block_ids)
        return num_blocks <= self._sliding.pool.num_free_blocks

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Holds the blocks of the hit for the request; they are its block table from now on."""
        num_blocks = len(hit.block_ids)
        self._full.admit(request.request_id, hit.block_ids, num_blocks)
        if self._sliding is not None:
            self._sliding.admit(request.request_id, hit.sliding_block_ids, num_blocks)
        self._num_published[request.request_id] = num_blocks
        self._count(request, hit)

    def num_blocks_missing(self, request: Request, num_new_tokens: int) -> int:
        """Blocks that `allocate` would take of each group so that `num_new_tokens` more tokens have a slot."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_blocks = -(-num_tokens // self.block_size)
        return max(0, num_blocks - len(self._full.tables[request.request_id].blocks))

    def can_allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Whether the pools have the blocks for `num_new_tokens` more tokens."""
        num_missing = self.num_blocks_missing(request, num_new_tokens)
        if self._sliding is not None and num_missing > self._sliding.pool.num_free_blocks:
            return False
        return num_missing <= self.pool.num_free_blocks

    def allocate(self, request: Request, num_new_tokens: int) -> None:
        """Gives the request slots for `num_new_tokens` more tokens. The caller has asked `can_allocate`."""
        num_missing = self.num_blocks_missing(request, num_new_tokens)
        if num_missing:
            for group in self._groups:
                group.extend(request.request_id, num_missing)

    def num_spare_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        """Of `num_tokens` tokens from `start` on, how many get a slot without a cached block being given up for it."""
        num_blocks = len(self._full.tables[request.request_id].blocks)
        num_missing = -(-(start + num_tokens) // self.block_size) - num_blocks
        if num_missing <= 0:
            return num_tokens
        num_spare = min(group.pool.num_unpublished_free_blocks(num_missing) for group in self._groups)
        return min(num_tokens, max(0, (num_blocks + num_spare) * self.block_size - start))

    def cut(self, request: Request) -> None:
        """Gives back the blocks behind the request's computed tokens; what was computed into them does not count."""
        num_blocks = -(-request.num_computed_tokens // self.block_size)
        for group in self._groups:
            group.cut(request.request_id, num_blocks)

    def release_unseen(self, request: Request) -> None:
        """Lets go of what no token of the request will look at any more, now that its computed tokens have advanced."""
        if self._sliding is not None:
            self._release_unseen(self._sliding, request, request.num_computed_tokens)

    def take_table_changes(self, request_id: RequestId) -> tuple[int, tuple[int, ...]]:
        """(index, blocks): what has changed in the full group's table since the last call: all from `index` on."""
        return self._full.take_changes(request_id)

    def take_sliding_changes(self, request_id: RequestId) -> SlidingTable | None:
        """The same of the sliding group; None where there is none."""
        if self._sliding is None:
            return None
        start, block_ids = self._sliding.take_changes(request_id)
        return SlidingTable(self._sliding.tables[request_id].first, start, block_ids)

    def begin_step(self) -> None:
        """From here on names are given in another step."""
        for group in self._groups:
            group.published_in_step.clear()

    def publish(self, request: Request, num_tokens: int) -> None:
        """Lets others find the full blocks of the first `num_tokens` tokens.

        Call it when these tokens are computed, or scheduled in the step in hand.
        """
        if not self._may_share(request) or request.is_private:
            return
        if self._deterministic:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        num_full = num_tokens // self.block_size
        num_published = self._num_published[request.request_id]
        if num_published >= num_full:
            return
        self.hasher.extend(request)
        for group in self._groups:
            group.publish(request.request_id, request.block_hashes, num_published, num_full)
        self._num_published[request.request_id] = num_full

    def holds_any_of_step(self, request_id: RequestId) -> bool:
        """Whether the request has a block that got its name in the step in hand."""
        return any(group.holds_any(request_id, group.published_in_step) for group in self._groups)

    def withdraw_step(self) -> None:
        """Takes back the names that `publish` gave in the step in hand, which has failed."""
        for group in self._groups:
            group.pool.withdraw(group.published_in_step)
        self.begin_step()

    def num_shared_tokens(self, request_id: RequestId) -> int:
        """Tokens at the start of the request whose blocks have a name: others may read them, nobody may write."""
        return self._num_published[request_id] * self.block_size

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """The request's blocks of the full group in token order."""
        table = self._full.tables.get(request_id)
        return () if table is None else tuple(table.blocks)

    def sliding_block_table(self, request_id: RequestId) -> tuple[int, tuple[int, ...]]:
        """(index, blocks): the request's blocks of the sliding group, which begin at that index."""
        table = None if self._sliding is None else self._sliding.tables.get(request_id)
        return (0, ()) if table is None else (table.first, tuple(table.blocks))

    def free(self, request_id: RequestId) -> None:
        """Gives all blocks of a request back; a request without blocks is fine."""
        for group in self._groups:
            group.free(request_id)
        self._num_published.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        """Forgets what is cached; running requests go on and publish what they compute from now on."""
        for group in self._groups:
            group.pool.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError when tables and pools disagree."""
        for group in self._groups:
            group.check_integrity()
            assert group.tables.keys() == self._full.tables.keys(), "a request is in one group only"
            for request_id, table in group.tables.items():
                assert table.stop == len(self._full.tables[request_id].blocks), "one group's table is shorter"

    def _may_share(self, request: Request) -> bool:
        return self._is_shared and not request.cache_scope.bypass

    def _num_new_blocks(self, request: Request, hit: PrefixHit) -> int:
        return -(-request.num_tokens // self.block_size) - len(hit.block_ids)

    def _release_unseen(self, sliding: KVGroup, request: Request, num_computed: int) -> None:
        sliding.release_before(request.request_id, sliding.first_seen(request.prompt, num_computed))

    def _find_from(self, request: Request, index: int) -> PrefixHit:
        """The longest run of cached blocks from block `index` on; `num_tokens` counts from the prompt's start."""
        self.hasher.extend(request)
        blocks = self._full.find_run(request.block_hashes, index)
        stop = index + len(blocks)
        if self._deterministic and stop * self.block_size == request.num_tokens:
            stop -= 1
        sliding_blocks: list[int] = []
        if self._sliding is not None:
            stop, sliding_blocks = self._find_sliding(self._sliding, request, index, stop)
        if stop <= index:
            return NO_HIT
        num_tokens = self._num_hit_tokens(request, stop)
        return PrefixHit(tuple(blocks[: stop - index]), num_tokens, tuple(sliding_blocks))

    def _find_sliding(self, sliding: KVGroup, request: Request, index: int, stop: int) -> tuple[int, list[int]]:
        """The last end of a hit up to `stop` from which layers with a window can go on, and their blocks from `index`.

        Those before `index` are the request's own. Every block is looked for at most twice.
        """
        hashes = request.block_hashes
        while stop > index:
            first = max(index, sliding.first_seen(request.prompt, self._num_hit_tokens(request, stop)))
            blocks = sliding.find_run_before(hashes, first, stop)
            if len(blocks) == stop - first:
                return stop, blocks
            # All ends behind a missing block up to here look at it, and every end at the block before itself.
            stop = sliding.last_stop(hashes, index, stop - len(blocks) - 1)
        return stop, []

    def _num_hit_tokens(self, request: Request, stop: int) -> int:
        """Tokens that need no computing when the blocks before index `stop` are there."""
        return min(stop * self.block_size, request.num_tokens - 1)

    def _count(self, request: Request, hit: PrefixHit) -> None:
        # After a preemption a request mostly finds its own blocks, which says nothing about the cache's use.
        if request.num_preemptions == 0:
            self.stats.num_query_tokens += request.num_tokens
            self.stats.num_hit_tokens += hit.num_tokens


def _sliding_group(size: SlidingGroupSize, block_size: int) -> KVGroup:
    return KVGroup(size.num_blocks, block_size, size.window, size.max_blocks_per_request)
