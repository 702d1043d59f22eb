"""One KV cache group: the blocks of the layers that see equally far, and which request holds which of them.

A model has a group of the layers that see everything and, where others have a sliding window, one of those. Each group
has a pool, block ids and block tables of its own; index i of a request's table is the same tokens in all of them.
In the sliding group a table loses the blocks at its start whose tokens nobody looks at any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decoder_svc.scheduling.block_pool import BlockPool
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import BlockHash, RequestId


@dataclass(frozen=True, slots=True)
class SlidingGroupSize:
    """The sliding group of a model: how far its layers see, and what it may hold."""

    # Tokens that a layer sees, the token itself included.
    window: int
    # Of the pool.
    num_blocks: int
    # Most blocks that one request holds at once: its window and what one step computes.
    max_blocks_per_request: int


@dataclass(slots=True)
class BlockTable:
    """One request's blocks of one group."""

    # Blocks before this index are let go; 0 where layers see everything.
    first: int
    # Those from `first` on, in token order.
    blocks: list[int]
    # The runner knows the table up to this index.
    num_sent: int = 0

    @property
    def stop(self) -> int:
        """One past the index of the last block."""
        return self.first + len(self.blocks)


class KVGroup:
    """A pool and the tables over it. Tables are extended and cut; what they hold is the caller's to say."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int | None = None,
        max_blocks_per_request: int | None = None,
    ) -> None:
        """`window` None: the layers see everything. `max_blocks_per_request` None: all that its tokens fill."""
        self.pool = BlockPool(num_blocks)
        self.tables: dict[RequestId, BlockTable] = {}
        # Blocks that got their name in the step in hand.
        self.published_in_step: list[int] = []
        self._block_size = block_size
        self._window = window
        self._max_blocks_per_request = max_blocks_per_request

    def first_seen(self, prompt: Prompt, start: int) -> int:
        """Index of the first block that the layers look at when tokens from `start` on are computed."""
        return 0 if self._window is None else prompt.first_seen(start, self._window) // self._block_size

    def find_run(self, hashes: Sequence[BlockHash], start: int) -> list[int]:
        """Cached blocks of these names from index `start` on, as far as there are any without a gap."""
        find = self.pool.find
        blocks: list[int] = []
        for index in range(start, len(hashes)):
            block = find(hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def last_stop(self, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """One past the last cached block of the names [start, stop); `start` where none of them is cached."""
        find = self.pool.find
        while stop > start and find(hashes[stop - 1]) is None:
            stop -= 1
        return stop

    def find_run_before(self, hashes: Sequence[BlockHash], start: int, stop: int) -> list[int]:
        """Cached blocks of the names [start, stop): those before `stop` as far as there are any without a gap."""
        blocks: list[int] = []
        for index in range(stop - 1, start - 1, -1):
            block = self.pool.find(hashes[index])
            if block is None:
                break
            blocks.append(block)
        blocks.reverse()
        return blocks

    def num_blocks_for_admission(self, num_new_blocks: int, found: Sequence[int]) -> int:
        """Free blocks that a request takes which has blocks that were found and will fill so many more.

        Of those found, the ones that somebody holds cost nothing, those that are free cost themselves, once.
        """
        num_blocks = num_new_blocks + sum(self.pool.is_free(block) for block in found)
        return num_blocks if self._max_blocks_per_request is None else min(num_blocks, self._max_blocks_per_request)

    def admit(self, request_id: RequestId, found: Sequence[int], stop: int) -> None:
        """Begins a request's table with blocks that were found, the last of which has index `stop` - 1."""
        assert request_id not in self.tables, "a request was admitted twice"
        self.pool.hold(found)
        first = stop - len(found)
        self.tables[request_id] = BlockTable(first, list(found), first)

    def adopt(self, request_id: RequestId, index: int, found: Sequence[int], stop: int) -> None:
        """Puts blocks that were found in the place of the request's own from `index` on.

        They end at `stop`. Where they begin behind `index`, nobody looks at what is before them.
        """
        table = self.tables[request_id]
        first_found = stop - len(found)
        split = index - table.first if first_found == index else 0
        own = table.blocks[split:]
        self.pool.hold(found)
        table.blocks[split:] = found
        if split == 0:
            table.first = first_found
        table.num_sent = min(index, table.num_sent)
        self.pool.release(own)

    def extend(self, request_id: RequestId, num_blocks: int) -> None:
        """Appends fresh blocks. The caller has asked the pool."""
        self.tables[request_id].blocks.extend(self.pool.allocate(num_blocks))

    def release_before(self, request_id: RequestId, index: int) -> None:
        """Lets go of the blocks before `index`; they are found by their names until somebody needs their room."""
        table = self.tables[request_id]
        num_unseen = index - table.first
        if num_unseen > 0:
            unseen = table.blocks[:num_unseen]
            del table.blocks[:num_unseen]
            table.first = index
            self.pool.release(unseen)

    def cut(self, request_id: RequestId, stop: int) -> None:
        """Gives back the blocks from index `stop` on; none of them has a name."""
        table = self.tables[request_id]
        if table.stop > stop:
            unused = table.blocks[stop - table.first :]
            del table.blocks[stop - table.first :]
            table.num_sent = min(table.num_sent, stop)
            self.pool.release(unused)

    def publish(self, request_id: RequestId, hashes: Sequence[BlockHash], start: int, stop: int) -> None:
        """Names the blocks [start, stop) of a table."""
        table = self.tables[request_id]
        blocks = table.blocks[start - table.first : stop - table.first]
        for block, block_hash in zip(blocks, hashes[start:stop], strict=True):
            self.pool.publish(block, block_hash)
        self.published_in_step += blocks

    def take_changes(self, request_id: RequestId) -> tuple[int, tuple[int, ...]]:
        """(index, blocks): what has changed in the table since the last call, which is all from `index` on."""
        table = self.tables[request_id]
        start = max(table.num_sent, table.first)
        table.num_sent = table.stop
        return start, tuple(table.blocks[start - table.first :])

    def free(self, request_id: RequestId) -> None:
        """Gives all blocks of a request back; a request without blocks is fine."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self.pool.release(table.blocks)

    def holds_any(self, request_id: RequestId, blocks: Iterable[int]) -> bool:
        """Whether any of these blocks is in the request's table."""
        return not set(blocks).isdisjoint(self.tables[request_id].blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError when tables and pool disagree."""
        self.pool.check_integrity(table.blocks for table in self.tables.values())
