"""Block tables and the prefix cache: the KV blocks of each request, and the blocks that need not be computed again.

A block is published (findable by its hash) as soon as the chunk that fills it is scheduled, so requests behind it in
the same step can use it. This is safe for two reasons. An attention backend writes a layer's keys and values of the
whole step before any query of that layer reads them. And a scheduled chunk is computed in that step, or the whole step
fails and its blocks are withdrawn. A block with a token whose id is not known when its chunk is scheduled is published
when the step is done.

A shared block is never written. If a prompt is cached up to its last token, that token is computed again for its
logits, but its keys and values are not stored (`ScheduledChunk.write_start`): the shared block has them.

Layers with a sliding window form a group of their own (kv_group.py), which releases blocks outside the window. A prefix
counts as cached only if both groups have all blocks that the next token attends to. Recurrent layers have states
instead of blocks (state_group.py): a prefix counts as cached only up to a block behind which there is a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from decoder_svc.scheduling.kv_cache.block_hash import BlockHasher
from decoder_svc.scheduling.kv_cache.block_pool import BlockPool
from decoder_svc.scheduling.kv_cache.kv_group import KVGroup, SlidingGroupSize
from decoder_svc.scheduling.kv_cache.state_group import StateGroup, StateGroupSize
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.scheduler_output import ScheduledChunk, SlidingTable, StateUse


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix of a request."""

    # Blocks of the full-attention group, in token order.
    block_ids: tuple[int, ...]
    # Tokens that need not be computed. At least one token always remains to compute, even if every block is cached.
    num_tokens: int
    # Blocks of the sliding group: the last ones of the same prefix, as far back as the next token's window reaches.
    sliding_block_ids: tuple[int, ...] = ()
    # The state behind the prefix; None: the model has no recurrent layers.
    snapshot: int | None = None


NO_HIT = PrefixHit((), 0)


@dataclass(slots=True)
class PrefixCacheStats:
    """Looked-up and cached tokens since start-up. Counted once per request, at its first admission."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class KVCacheManager:
    """Maps requests to KV blocks of `block_size` tokens. Questions never change state."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        deployment: bytes = b"",
        is_shared: bool = True,
        deterministic: bool = False,
        sliding: SlidingGroupSize | None = None,
        states: StateGroupSize | None = None,
    ) -> None:
        """Creates empty tables and pools.

        Args:
            num_blocks: Blocks of the full-attention group.
            deployment: See `BlockHasher`.
            is_shared: False disables the prefix cache: nothing is hashed, published or found.
            deterministic: Shares only whole blocks of prompts, which are computed block by block.
            sliding: Size of the sliding-window group; None: the model has none.
            states: Size of the group of recurrent layers; None: the model has none.
        """
        self.block_size = block_size
        self.hasher = BlockHasher(block_size, deployment)
        self.stats = PrefixCacheStats()
        self._is_shared = is_shared
        self._deterministic = deterministic
        self._full = KVGroup(num_blocks, block_size)
        # The pool of the full-attention group.
        self.pool = self._full.pool
        self._sliding = None if sliding is None else _sliding_group(sliding, block_size)
        self._groups = [self._full] if self._sliding is None else [self._full, self._sliding]
        self._states = None if states is None else StateGroup(states, block_size)
        # Number of blocks at the start of each table that were found in the cache or have been published.
        self._num_published: dict[RequestId, int] = {}

    @property
    def sliding_pool(self) -> BlockPool | None:
        """The pool of the sliding-window group; None if the model has none."""
        return None if self._sliding is None else self._sliding.pool

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers. Their states cannot go back to an earlier token."""
        return self._states is not None

    @property
    def snapshot_pool(self) -> BlockPool | None:
        """The pool of snapshots of recurrent layers; None if the model has none."""
        return None if self._states is None else self._states.pool

    @property
    def max_tokens(self) -> int:
        """Number of tokens that fit if one request has the whole pool."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0..1, in the fuller group. Free cached blocks do not count."""
        return max(group.pool.usage for group in self._groups)

    @property
    def version(self) -> int:
        """A number that changes whenever `find_prefix` may return something else."""
        pools = (self.pool, self.sliding_pool, self.snapshot_pool)
        return sum(pool.version for pool in pools if pool is not None)

    def find_prefix(self, request: Request) -> PrefixHit:
        """Returns the longest cached prefix of a request that has no blocks yet."""
        if not self._may_share(request):
            return NO_HIT
        return self._find_from(request, 0)

    def finds_more_next_step(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the step in progress takes a snapshot with which the request's hit will be longer in the next step.

        Equal prompts that arrive together, such as several answers to one, are then computed once.
        """
        if self._states is None or not self._may_share(request):
            return False
        self.hasher.extend(request)
        most = (request.num_tokens - 1) // self.block_size
        return self._states.takes_any(request.block_hashes[len(hit.block_ids) : most])

    def may_find_more(self, request: Request) -> bool:
        """Whether at least one whole block of the request's known tokens is uncomputed; False while it decodes."""
        return (request.num_tokens - 1) // self.block_size > request.num_computed_tokens // self.block_size

    def find_more(self, request: Request) -> PrefixHit:
        """Returns blocks ahead of a request in the middle of its prompt that others have published meanwhile.

        The blocks begin with the one of the request's next token. Returns NO_HIT unless they are at least one whole
        block ahead.
        """
        if not self._may_share(request):
            return NO_HIT
        hit = self._find_from(request, request.num_computed_tokens // self.block_size)
        return hit if hit.num_tokens > request.num_computed_tokens else NO_HIT

    def adopt(self, request: Request, hit: PrefixHit) -> None:
        """Replaces the request's own blocks, from that of its next token on, by the blocks of `find_more`."""
        index = request.num_computed_tokens // self.block_size
        stop = index + len(hit.block_ids)
        self._full.adopt(request.request_id, index, hit.block_ids, stop)
        if self._sliding is not None:
            self._sliding.adopt(request.request_id, index, hit.sliding_block_ids, stop)
            self._release_unseen(self._sliding, request, hit.num_tokens)
        if self._states is not None:
            assert hit.snapshot is not None, "a hit without a snapshot"
            self._states.adopt(request.request_id, hit.snapshot)
        self._num_published[request.request_id] = stop

    def num_blocks_for_admission(self, request: Request, hit: PrefixHit) -> int:
        """Returns how many free blocks of the full group an admission takes, with room for all known tokens."""
        return self._full.num_blocks_for_admission(self._num_new_blocks(request, hit), hit.block_ids)

    def can_admit(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the free blocks suffice for all known tokens of the request, and a state is free if it needs one."""
        if self.num_blocks_for_admission(request, hit) > self.pool.num_free_blocks:
            return False
        if self._states is not None and not self._states.has_free_slot:
            return False
        if self._sliding is None:
            return True
        num_blocks = self._sliding.num_blocks_for_admission(self._num_new_blocks(request, hit), hit.sliding_block_ids)
        return num_blocks <= self._sliding.pool.num_free_blocks

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Starts the request's block table with the blocks of the hit, and holds them."""
        num_blocks = len(hit.block_ids)
        self._full.admit(request.request_id, hit.block_ids, num_blocks)
        if self._sliding is not None:
            self._sliding.admit(request.request_id, hit.sliding_block_ids, num_blocks)
        if self._states is not None:
            self._states.admit(request.request_id, hit.snapshot)
        self._num_published[request.request_id] = num_blocks
        self._count(request, hit)

    def num_blocks_missing(self, request: Request, num_new_tokens: int) -> int:
        """Returns how many blocks `allocate` would take from each group for `num_new_tokens` more tokens."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_blocks = -(-num_tokens // self.block_size)
        return max(0, num_blocks - len(self._full.tables[request.request_id].blocks))

    def can_allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Whether the pools have enough free blocks for `num_new_tokens` more tokens."""
        num_missing = self.num_blocks_missing(request, num_new_tokens)
        if self._sliding is not None and num_missing > self._sliding.pool.num_free_blocks:
            return False
        return num_missing <= self.pool.num_free_blocks

    def allocate(self, request: Request, num_new_tokens: int) -> None:
        """Gives the request slots for `num_new_tokens` more tokens. Call `can_allocate` first."""
        num_missing = self.num_blocks_missing(request, num_new_tokens)
        if num_missing:
            for group in self._groups:
                group.extend(request.request_id, num_missing)

    def has_slot_for_answer(self, request: Request) -> bool:
        """Whether nothing but the slot of the request's next token is needed to compute it, and the slot is there.

        True in most steps of a request that decodes: it has one token to compute, behind its prompt, in the middle of a
        block. No block is taken or filled.
        """
        start = request.num_computed_tokens
        return (
            0 < start % self.block_size < self.block_size - 1
            and start >= request.num_prompt_tokens
            and request.num_tokens - start == 1
            and self._sliding is None
            and self._states is None
        )

    def num_spare_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        """Returns how many of `num_tokens` draft tokens from `start` on fit without evicting a cached block.

        In a model with recurrent layers, each also needs a copy of the state in front of it.
        """
        if self._states is not None:
            num_tokens = min(num_tokens, self._states.num_free_draft_states)
        num_blocks = len(self._full.tables[request.request_id].blocks)
        num_missing = -(-(start + num_tokens) // self.block_size) - num_blocks
        if num_missing <= 0:
            return num_tokens
        num_spare = min(group.pool.num_unpublished_free_blocks(num_missing) for group in self._groups)
        return min(num_tokens, max(0, (num_blocks + num_spare) * self.block_size - start))

    def cut(self, request: Request) -> None:
        """Releases the blocks behind the request's computed tokens, and with them the results of rejected drafts."""
        num_blocks = -(-request.num_computed_tokens // self.block_size)
        for group in self._groups:
            group.cut(request.request_id, num_blocks)

    def release_unseen(self, request: Request) -> None:
        """Releases sliding-group blocks outside the window of all tokens that the request has yet to compute."""
        if self._sliding is not None:
            self._release_unseen(self._sliding, request, request.num_computed_tokens)

    def take_table_changes(self, request_id: RequestId) -> tuple[int, tuple[int, ...]]:
        """Returns (index, blocks): the full group's table from the first index that changed since the last call."""
        return self._full.take_changes(request_id)

    def take_sliding_changes(self, request_id: RequestId) -> SlidingTable | None:
        """Returns the changes of the sliding group's table; None if the model has no such group."""
        if self._sliding is None:
            return None
        start, block_ids = self._sliding.take_changes(request_id)
        return SlidingTable(self._sliding.tables[request_id].first, start, block_ids)

    def take_state_use(self, request: Request, num_new_tokens: int) -> StateUse | None:
        """Returns the states that a chunk of the next `num_new_tokens` tokens uses; None without recurrent layers.

        Call it once for each scheduled chunk: it allocates the snapshots that the chunk takes.
        """
        if self._states is None:
            return None
        start = request.num_computed_tokens
        max_snapshot = 0
        if self._may_publish(request):
            self.hasher.extend(request)
            max_snapshot = self._num_publishable(request, len(request.token_ids))
        return self._states.take_use(request, start, start + num_new_tokens, max_snapshot=max_snapshot)

    def add_draft_states(self, request: Request, chunk: ScheduledChunk, num_drafts: int) -> StateUse | None:
        """Returns the states of a chunk of one token to which drafts are appended; None without recurrent layers."""
        if self._states is None or chunk.states is None:
            return None
        publishes = self._may_publish_answer(request)
        return self._states.add_drafts(request.request_id, chunk.states, chunk.start, num_drafts, publishes=publishes)

    def settle_draft_states(self, request: Request) -> None:
        """Has a request continue behind its computed tokens after a chunk with drafts."""
        if self._states is None:
            return
        publishes = self._may_publish_answer(request)
        if publishes:
            self.hasher.extend(request)
        self._states.settle_drafts(request, request.num_computed_tokens, publishes=publishes)

    def begin_step(self) -> None:
        """Starts a step. Blocks published from now on can be withdrawn until `end_step`."""
        for group in self._groups:
            group.unproven.append([])
        if self._states is not None:
            self._states.begin_step()

    def end_step(self) -> None:
        """Ends the oldest step without an end: its blocks are computed."""
        for group in self._groups:
            del group.unproven[:1]
        if self._states is not None:
            self._states.end_step()

    def publish(self, request: Request, num_tokens: int, *, is_computed: bool = False) -> None:
        """Makes the full blocks of the first `num_tokens` tokens, as far as they are known, findable for others.

        Call it when these tokens are scheduled in the step that began last, or with `is_computed` when they are
        computed.
        """
        num_published = self._num_published[request.request_id]
        if num_tokens // self.block_size <= num_published or not self._may_publish(request):
            return
        num_full = self._num_publishable(request, num_tokens) // self.block_size
        if num_published >= num_full:
            return
        self.hasher.extend(request)
        for group in self._groups:
            blocks = group.publish(request.request_id, request.block_hashes, num_published, num_full)
            if group.unproven and not is_computed:
                group.unproven[-1] += blocks
        self._num_published[request.request_id] = num_full

    def holds_any_of_steps(self, request_id: RequestId) -> bool:
        """Whether the request holds a block, or continues from a snapshot, of a step without an end."""
        if self._states is not None and self._states.loads_of_steps(request_id):
            return True
        return any(group.holds_any(request_id, chain(*group.unproven)) for group in self._groups)

    def withdraw_steps(self) -> None:
        """Ends all steps because they failed: makes the blocks published in them unfindable again."""
        for group in self._groups:
            group.pool.withdraw(chain(*group.unproven))
            group.unproven.clear()
        if self._states is not None:
            self._states.withdraw_steps()

    def num_shared_tokens(self, request_id: RequestId) -> int:
        """Returns how many tokens at the request's start are in published blocks, which must not be written."""
        return self._num_published[request_id] * self.block_size

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """Returns the request's blocks of the full group in token order."""
        table = self._full.tables.get(request_id)
        return () if table is None else tuple(table.blocks)

    def sliding_block_table(self, request_id: RequestId) -> tuple[int, tuple[int, ...]]:
        """Returns (index, blocks): the request's blocks of the sliding group, which begin at that index."""
        table = None if self._sliding is None else self._sliding.tables.get(request_id)
        return (0, ()) if table is None else (table.first, tuple(table.blocks))

    def free(self, request_id: RequestId) -> None:
        """Releases all blocks of a request, which may have none."""
        for group in self._groups:
            group.free(request_id)
        if self._states is not None:
            self._states.free(request_id)
        self._num_published.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Running requests continue and publish the blocks that they compute from now on."""
        for group in self._groups:
            group.pool.reset()
        if self._states is not None:
            self._states.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError if tables and pools disagree."""
        for group in self._groups:
            group.check_integrity()
            assert group.tables.keys() == self._full.tables.keys(), "a request is in one group only"
            for request_id, table in group.tables.items():
                assert table.stop == len(self._full.tables[request_id].blocks), "one group's table is shorter"
        if self._states is not None:
            self._states.check_integrity()
            assert self._states.requests == self._full.tables.keys(), "a request has blocks or a state only"

    def _may_share(self, request: Request) -> bool:
        return self._is_shared and not request.cache_scope.bypass

    def _may_publish(self, request: Request) -> bool:
        return self._may_share(request) and not request.is_private

    def _may_publish_answer(self, request: Request) -> bool:
        return self._may_publish(request) and not self._deterministic

    def _num_publishable(self, request: Request, num_tokens: int) -> int:
        """Returns how many of the request's first `num_tokens` tokens are known and may be shared."""
        num_tokens = min(num_tokens, len(request.token_ids))
        return min(num_tokens, request.num_prompt_tokens) if self._deterministic else num_tokens

    def _num_new_blocks(self, request: Request, hit: PrefixHit) -> int:
        return -(-request.num_tokens // self.block_size) - len(hit.block_ids)

    def _release_unseen(self, sliding: KVGroup, request: Request, num_computed: int) -> None:
        sliding.release_before(request.request_id, sliding.first_seen(request.prompt, num_computed))

    def _find_from(self, request: Request, index: int) -> PrefixHit:
        """Returns the longest run of cached blocks from `index` on; its `num_tokens` counts from the prompt's start."""
        self.hasher.extend(request)
        blocks = self._full.find_run(request.block_hashes, index)
        stop = index + len(blocks)
        if self._deterministic and stop * self.block_size == request.num_tokens:
            stop -= 1
        sliding_blocks: list[int] = []
        snapshot: int | None = None
        if self._states is not None:
            # At least one token is computed, and a state cannot go back by one token.
            stop = min(stop, (request.num_tokens - 1) // self.block_size)
            stop, snapshot = self._states.find_last(request.block_hashes, index, stop)
        if self._sliding is not None:
            usable, sliding_blocks = self._find_sliding(self._sliding, request, index, stop)
            while self._states is not None and index < usable < stop:
                stop, snapshot = self._states.find_last(request.block_hashes, index, usable)
                usable, sliding_blocks = self._find_sliding(self._sliding, request, index, stop)
            stop = usable
        if stop <= index:
            return NO_HIT
        num_tokens = self._num_hit_tokens(request, stop)
        return PrefixHit(tuple(blocks[: stop - index]), num_tokens, tuple(sliding_blocks), snapshot)

    def _find_sliding(self, sliding: KVGroup, request: Request, index: int, stop: int) -> tuple[int, list[int]]:
        """Returns the last usable end of a hit, at most `stop`, and the sliding group's blocks for it.

        An end is usable if the sliding group has every block that the next token attends to. Blocks before `index` are
        the request's own and need not be found. Looks up every block at most twice.
        """
        hashes = request.block_hashes
        while stop > index:
            first = max(index, sliding.first_seen(request.prompt, self._num_hit_tokens(request, stop)))
            blocks = sliding.find_run_before(hashes, first, stop)
            if len(blocks) == stop - first:
                return stop, blocks
            # Ends between the missing block and `stop` need that block. Every end needs the block before it, except one
            # at which a chunk of the sequence begins.
            missing = stop - len(blocks) - 1
            stop = max(sliding.last_stop(hashes, index, missing), sliding.last_chunk_start(missing))
        return stop, []

    def _num_hit_tokens(self, request: Request, stop: int) -> int:
        """Returns the tokens that need not be computed if the blocks before index `stop` are cached."""
        return min(stop * self.block_size, request.num_tokens - 1)

    def _count(self, request: Request, hit: PrefixHit) -> None:
        # A readmitted request mostly finds its own blocks: counting it would inflate the hit rate.
        if request.num_preemptions == 0:
            self.stats.num_query_tokens += request.num_tokens
            self.stats.num_hit_tokens += hit.num_tokens


def _sliding_group(size: SlidingGroupSize, block_size: int) -> KVGroup:
    return KVGroup(size.num_blocks, block_size, size.window, size.max_blocks_per_request)
