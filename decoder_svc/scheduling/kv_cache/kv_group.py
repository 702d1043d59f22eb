"""One KV cache group: the blocks of all layers with the same attention window, and the requests' tables of them.

A model has a group for the layers with full attention and, if it has layers with a window (window.py), one for those,
the sliding group. Each group has its own pool, block ids and block tables. Index i of a request's table covers the same
tokens in every group. In the sliding group, a table releases blocks at its start that are outside the window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decoder_svc.scheduling.kv_cache.block_pool import BlockPool
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import BlockHash, RequestId
from decoder_svc.scheduling.window import Window


@dataclass(frozen=True, slots=True)
class SlidingGroupSize:
    """The window of a model's sliding group, and the size of its pool."""

    window: Window
    # Blocks of the pool.
    num_blocks: int
    # Most blocks that one request holds at once: its window and the tokens of one step.
    max_blocks_per_request: int


@dataclass(slots=True)
class BlockTable:
    """One request's blocks of one group."""

    # Blocks before this index are released; 0 for full attention.
    first: int
    # The blocks from index `first` on, in token order.
    blocks: list[int]
    # The runner has received the table up to this index.
    num_sent: int = 0

    @property
    def stop(self) -> int:
        """One past the index of the last block."""
        return self.first + len(self.blocks)


class KVGroup:
    """A pool and the block tables of requests. The caller decides which tokens the blocks hold."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: Window | None = None,
        max_blocks_per_request: int | None = None,
    ) -> None:
        """`window` None means full attention. `max_blocks_per_request` None means no limit."""
        self.pool = BlockPool(num_blocks)
        self.tables: dict[RequestId, BlockTable] = {}
        # Blocks that were published when they were scheduled, for each step whose result is not known, in order.
        self.unproven: list[list[int]] = []
        self._block_size = block_size
        self._window = window
        self._max_blocks_per_request = max_blocks_per_request

    def first_seen(self, prompt: Prompt, start: int) -> int:
        """Returns the index of the first block that the layers attend to when tokens from `start` on are computed."""
        return 0 if self._window is None else prompt.first_seen(start, self._window) // self._block_size

    def last_chunk_start(self, index: int) -> int:
        """Returns the last block, up to `index`, with whose first token a chunk of the sequence begins; 0 if none."""
        if self._window is None or not self._window.is_chunked:
            return 0
        return index - index % (math.lcm(self._window.size, self._block_size) // self._block_size)

    def find_run(self, hashes: Sequence[BlockHash], start: int) -> list[int]:
        """Returns the cached blocks of these hashes from index `start` on, up to the first gap."""
        find = self.pool.find
        blocks: list[int] = []
        for index in range(start, len(hashes)):
            block = find(hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def last_stop(self, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """Returns one past the last cached block of the hashes [start, stop); `start` if none is cached."""
        find = self.pool.find
        while stop > start and find(hashes[stop - 1]) is None:
            stop -= 1
        return stop

    def find_run_before(self, hashes: Sequence[BlockHash], start: int, stop: int) -> list[int]:
        """Returns the cached blocks of the hashes [start, stop), from `stop` backwards up to the first gap."""
        blocks: list[int] = []
        for index in range(stop - 1, start - 1, -1):
            block = self.pool.find(hashes[index])
            if block is None:
                break
            blocks.append(block)
        blocks.reverse()
        return blocks

    def num_blocks_for_admission(self, num_new_blocks: int, found: Sequence[int]) -> int:
        """Returns how many free blocks the admission of a request takes.

        `found` are its cached blocks: one that is held by another request costs nothing, a free one costs itself.
        """
        num_blocks = num_new_blocks + sum(self.pool.is_free(block) for block in found)
        return num_blocks if self._max_blocks_per_request is None else min(num_blocks, self._max_blocks_per_request)

    def admit(self, request_id: RequestId, found: Sequence[int], stop: int) -> None:
        """Starts a request's table with cached blocks, the last of which has index `stop` - 1."""
        assert request_id not in self.tables, "a request was admitted twice"
        self.pool.hold(found)
        first = stop - len(found)
        self.tables[request_id] = BlockTable(first, list(found), first)

    def adopt(self, request_id: RequestId, index: int, found: Sequence[int], stop: int) -> None:
        """Replaces the request's own blocks from `index` on by cached blocks, which end at `stop`.

        If the cached blocks begin behind `index`, the blocks before them are outside the window.
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
        """Appends newly allocated blocks. Check the pool's free blocks first."""
        self.tables[request_id].blocks.extend(self.pool.allocate(num_blocks))

    def release_before(self, request_id: RequestId, index: int) -> None:
        """Releases the blocks before `index`; published ones stay findable until they are allocated again."""
        table = self.tables[request_id]
        num_unseen = index - table.first
        if num_unseen > 0:
            unseen = table.blocks[:num_unseen]
            del table.blocks[:num_unseen]
            table.first = index
            self.pool.release(unseen)

    def cut(self, request_id: RequestId, stop: int) -> None:
        """Releases the blocks from index `stop` on, none of which is published."""
        table = self.tables[request_id]
        if table.stop > stop:
            unused = table.blocks[stop - table.first :]
            del table.blocks[stop - table.first :]
            table.num_sent = min(table.num_sent, stop)
            self.pool.release(unused)

    def publish(self, request_id: RequestId, hashes: Sequence[BlockHash], start: int, stop: int) -> list[int]:
        """Publishes those of the blocks [start, stop) that the table still has, and returns them.

        A block may have left the window before the hash of its last token was known.
        """
        table = self.tables[request_id]
        start, stop = max(start, table.first), max(stop, table.first)
        blocks = table.blocks[start - table.first : stop - table.first]
        for block, block_hash in zip(blocks, hashes[start:stop], strict=True):
            self.pool.publish(block, block_hash)
        return blocks

    def take_changes(self, request_id: RequestId) -> tuple[int, tuple[int, ...]]:
        """Returns (index, blocks): the table from the first index that changed since the last call."""
        table = self.tables[request_id]
        start = max(table.num_sent, table.first)
        table.num_sent = table.stop
        return start, tuple(table.blocks[start - table.first :])

    def free(self, request_id: RequestId) -> None:
        """Releases all blocks of a request, which may have none."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self.pool.release(table.blocks)

    def holds_any(self, request_id: RequestId, blocks: Iterable[int]) -> bool:
        """Whether any of these blocks is in the request's table."""
        return not set(blocks).isdisjoint(self.tables[request_id].blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError if tables and pool disagree."""
        self.pool.check_integrity(table.blocks for table in self.tables.values())
