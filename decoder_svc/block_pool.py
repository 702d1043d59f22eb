"""The pool of KV blocks: which are free, which are owned. Block ids only; the memory belongs to the runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """Hands out block ids 0 … num_blocks − 1, each to one owner at a time."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._used = [False] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0..1."""
        return 1 - len(self._free) / self.num_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks, least recently freed first. The caller has asked `num_free_blocks`."""
        assert num_blocks <= len(self._free), "allocate() without asking num_free_blocks"
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._used[block] = True
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives a sequence's blocks back, its last block first."""
        for block in reversed(blocks):
            assert self._used[block], f"block {block} was freed twice"
            self._used[block] = False
            self._free.append(block)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless free + owned = all, without duplicates. For tests and idle moments."""
        held = [block for blocks in owned for block in blocks]
        free = list(self._free)
        assert sorted(held + free) == list(range(self.num_blocks)), "blocks were lost or doubled"
        assert all(self._used[block] for block in held), "an owned block is marked free"
        assert not any(self._used[block] for block in free), "a free block is marked used"
