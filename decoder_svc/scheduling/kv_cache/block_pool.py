"""The pool of KV blocks: holders, published hashes, and the order of eviction. Manages block ids, not memory.

A block is free when no request holds it. A free block keeps its published hash, and can be found by it, until it is
allocated again. Free blocks are allocated in this order: unpublished ones first, then the ones released longest ago.
Of one sequence the last block goes first, because a prefix is useful without its tail but not the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from decoder_svc.scheduling.request import BlockHash


class BlockPool:
    """Blocks 0 … num_blocks − 1 with their holders and hashes. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        # Several blocks may have equal content, if requests that started together each computed their own.
        self._blocks_by_hash: dict[BlockHash, dict[int, None]] = {}
        # In order of allocation.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Changes whenever `find` may return something else.
        self.version = 0

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without a holder, published or not."""
        return len(self._free)

    @property
    def num_published_blocks(self) -> int:
        """Number of blocks that `find` can return."""
        return sum(len(blocks) for blocks in self._blocks_by_hash.values())

    @property
    def usage(self) -> float:
        """Share of blocks with a holder, 0..1."""
        return 1 - len(self._free) / self.num_blocks

    def find(self, block_hash: BlockHash) -> int | None:
        """Returns a block with this hash, or None."""
        blocks = self._blocks_by_hash.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def num_unpublished_free_blocks(self, at_most: int) -> int:
        """Returns how many blocks can be allocated before one with a published hash, counted up to `at_most`."""
        next_blocks = islice(self._free, at_most)
        return sum(1 for _ in takewhile(lambda block: self._hashes[block] is None, next_blocks))

    def is_free(self, block: int) -> bool:
        """Whether the block has no holder."""
        return self._num_holders[block] == 0

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that `find` returned; they are no longer free."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._free[block]
            self._num_holders[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Returns unpublished blocks with one holder each, evicting cached ones. Check `num_free_blocks` first."""
        assert num_blocks <= len(self._free), "allocate() without checking num_free_blocks"
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._forget(block)
            self._num_holders[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a holder from a sequence's blocks, which are given in token order."""
        for block in reversed(blocks):
            assert self._num_holders[block] > 0, f"block {block} was freed twice"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Makes a held block findable by its hash. All its slots must be filled."""
        assert self._num_holders[block] > 0, f"block {block} is published without a holder"
        assert self._hashes[block] is None, f"block {block} is published twice"
        self._hashes[block] = block_hash
        blocks = self._blocks_by_hash.setdefault(block_hash, {})
        blocks[block] = None
        self.version += 1

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Makes blocks unfindable again because their step failed."""
        for block in blocks:
            self._forget(block)

    def reset(self) -> None:
        """Drops all published hashes; holders keep their blocks."""
        self._hashes = [None] * self.num_blocks
        self._blocks_by_hash.clear()
        self.version += 1

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the pool's records agree with `held`, the blocks of each sequence."""
        num_holders = [0] * self.num_blocks
        for blocks in held:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                num_holders[block] += 1
        assert num_holders == self._num_holders, "the holders of a block were miscounted"
        # Tests check pools of 20,000 blocks after each step, so no Python loop runs over all blocks.
        assert num_holders.count(0) == len(self._free), "free list and holders disagree"
        assert not any(map(num_holders.__getitem__, self._free)), "free list and holders disagree"
        found = {block: block_hash for block_hash, blocks in self._blocks_by_hash.items() for block in blocks}
        assert len(found) == self.num_blocks - self._hashes.count(None), "blocks and hashes disagree"
        assert all(self._hashes[block] == block_hash for block, block_hash in found.items()), (
            "blocks and hashes disagree"
        )
        assert all(self._blocks_by_hash.values()), "a hash without blocks was kept"

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is None:
            return
        self._hashes[block] = None
        blocks = self._blocks_by_hash[block_hash]
        del blocks[block]
        self.version += 1
        if not blocks:
            del self._blocks_by_hash[block_hash]
