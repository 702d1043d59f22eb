"""The pool of KV blocks: who holds them, what they are called, and which go first. Block ids only; no memory.

A block is free when nobody holds it; a free block keeps its name, and can be found by it, until it is handed out again.
Free blocks leave in one order: first those without a name, then those whose holders let them go longest ago, and of one
sequence the last block first, because a prefix without its tail is still of use and a tail without its prefix is not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, takewhile

from decoder_svc.scheduling.request import BlockHash


class BlockEventKind(Enum):
    """What happened to a name."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A name became findable, or ceased to be; for routers that know which decoder has which prefix."""

    kind: BlockEventKind
    # None when all names were cleared.
    block_hash: BlockHash | None


class BlockPool:
    """Blocks 0 … num_blocks − 1 with holders and names. Everything is O(1) per block."""

    def __init__(self, num_blocks: int, on_event: Callable[[BlockEvent], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._on_event = on_event
        self._num_holders = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        # Several blocks may hold the same: requests that started together each computed their own.
        self._blocks_by_hash: dict[BlockHash, dict[int, None]] = {}
        # Next to be handed out first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Changes whenever `find` may answer differently.
        self.version = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, named ones included."""
        return len(self._free)

    @property
    def num_named_blocks(self) -> int:
        """Blocks that `find` can return."""
        return sum(len(blocks) for blocks in self._blocks_by_hash.values())

    @property
    def usage(self) -> float:
        """Share of blocks that somebody holds, 0..1."""
        return 1 - len(self._free) / self.num_blocks

    def find(self, block_hash: BlockHash) -> int | None:
        """A block of this name, None if there is none."""
        blocks = self._blocks_by_hash.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def num_unnamed_free_blocks(self, at_most: int) -> int:
        """Of the blocks that would be handed out next, those before the first with a name, counted up to `at_most`."""
        next_blocks = islice(self._free, at_most)
        return sum(1 for _ in takewhile(lambda block: self._hashes[block] is None, next_blocks))

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the block."""
        return self._num_holders[block] == 0

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that were found; free ones are free no more."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._free[block]
            self._num_holders[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Hands out blocks with one holder and without a name. The caller has asked `num_free_blocks`."""
        assert num_blocks <= len(self._free), "allocate() without asking num_free_blocks"
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._forget(block)
            self._num_holders[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a holder from a sequence's blocks, given in token order."""
        for block in reversed(blocks):
            assert self._num_holders[block] > 0, f"block {block} was freed twice"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Gives a held block, whose every slot is filled, the name by which it is found from now on."""
        assert self._num_holders[block] > 0, f"block {block} is named without a holder"
        assert self._hashes[block] is None, f"block {block} is named twice"
        self._hashes[block] = block_hash
        blocks = self._blocks_by_hash.setdefault(block_hash, {})
        blocks[block] = None
        self.version += 1
        if len(blocks) == 1:
            self._tell(BlockEventKind.STORED, block_hash)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Takes the names of blocks back: they were not computed after all."""
        for block in blocks:
            self._forget(block)

    def reset(self) -> None:
        """Forgets all names; holders keep their blocks."""
        self._hashes = [None] * self.num_blocks
        self._blocks_by_hash.clear()
        self.version += 1
        self._tell(BlockEventKind.CLEARED, None)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless holders, names and the free list agree with the sequences that hold blocks."""
        num_holders = [0] * self.num_blocks
        for blocks in held:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                num_holders[block] += 1
        assert num_holders == self._num_holders, "the holders of a block were miscounted"
        # Tests check pools of 20,000 blocks after each step, so no loop of Python's runs over all blocks.
        assert num_holders.count(0) == len(self._free), "free list and holders disagree"
        assert not any(map(num_holders.__getitem__, self._free)), "free list and holders disagree"
        found = {block: name for name, blocks in self._blocks_by_hash.items() for block in blocks}
        assert len(found) == self.num_blocks - self._hashes.count(None), "blocks and names disagree"
        assert all(self._hashes[block] == name for block, name in found.items()), "blocks and names disagree"
        assert all(self._blocks_by_hash.values()), "a name without blocks was kept"

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
            self._tell(BlockEventKind.REMOVED, block_hash)

    def _tell(self, kind: BlockEventKind, block_hash: BlockHash | None) -> None:
        if self._on_event is not None:
            self._on_event(BlockEvent(kind, block_hash))
