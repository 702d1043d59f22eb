"""The group of recurrent layers: one state per running request, and snapshots of states at the ends of blocks.

A recurrent layer (gated delta net, arXiv:2412.06464) keeps no keys and values. It has one state per sequence, which
every token changes, so an earlier state is lost unless it was copied. A snapshot is such a copy, made at the end of a
block and found by that block's hash. A prefix counts as cached only up to a block whose snapshot exists.

A snapshot is taken after every `interval` blocks, and after the last block that lies before the last token of the
prompt, because the next turn of a chat and the other answers to a prompt begin there. The pool evicts the snapshot that
has not been used for longest.

Unlike a block, a snapshot can be found only in the step after the one that takes it: a layer computes the sequences of
a step side by side. A snapshot that a step reads or writes is not allocated again in that step.

A chunk with draft tokens leaves a state that has seen all of them. It therefore also copies the state in front of each
draft. When it is known how many drafts were accepted, the request continues from the copy behind the last of them.
Copies for drafts have states of their own behind the snapshots, except at the end of an interval, where the copy may
become a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from decoder_svc.scheduling.kv_cache.block_pool import BlockPool
from decoder_svc.scheduling.request import BlockHash, Request, RequestId
from decoder_svc.scheduling.scheduler_output import StateUse


@dataclass(frozen=True, slots=True)
class StateGroupSize:
    """Numbers of states of a model with recurrent layers."""

    # Requests that run at the same time; each has one state.
    num_slots: int
    # States that are kept for later requests, at least 1.
    num_snapshots: int
    # Blocks between two snapshots of a sequence, at least 1.
    interval: int
    # States in front of the draft tokens of a step, numbered behind the snapshots; 0: the model gets no drafts.
    num_draft_states: int = 0

    @property
    def num_copies(self) -> int:
        """Snapshots and states in front of drafts together."""
        return self.num_snapshots + self.num_draft_states


class StateGroup:
    """The slots of running requests and the pool of snapshots."""

    def __init__(self, size: StateGroupSize, block_size: int) -> None:
        self.pool = BlockPool(size.num_snapshots)
        # Snapshots that were taken in each step whose result is not known, in order.
        self.unproven: list[list[int]] = []
        self._num_slots = size.num_slots
        self._interval = size.interval
        self._block_size = block_size
        self._free_slots = list(range(size.num_slots - 1, -1, -1))
        self._slots: dict[RequestId, int] = {}
        self._num_copies = size.num_copies
        self._free_draft_states = list(range(size.num_copies - 1, size.num_snapshots - 1, -1))
        # The copies of requests whose drafts are not settled, by the number of tokens that each has seen.
        self._drafts: dict[RequestId, dict[int, int]] = {}
        # The snapshot from which a request continues at its next chunk; held until then.
        self._to_load: dict[RequestId, int] = {}
        # Snapshots that the latest step reads or writes; held until the next step begins.
        self._in_use: list[int] = []
        # Snapshots that the latest step takes, by their hashes.
        self._unpublished: dict[BlockHash, int] = {}

    @property
    def has_free_slot(self) -> bool:
        """Whether a further request can be admitted."""
        return bool(self._free_slots)

    @property
    def num_free_draft_states(self) -> int:
        """Number of further draft tokens that a step may have."""
        return len(self._free_draft_states)

    @property
    def requests(self) -> set[RequestId]:
        """Ids of the requests that have a slot."""
        return set(self._slots)

    def find_last(self, hashes: Sequence[BlockHash], start: int, stop: int) -> tuple[int, int | None]:
        """Returns (index, snapshot): the last snapshot behind a block of [start, stop), and the index behind the block.

        Returns (`start`, None) if there is none.
        """
        for index in range(stop, start, -1):
            snapshot = self.pool.find(hashes[index - 1])
            if snapshot is not None:
                return index, snapshot
        return start, None

    def takes_any(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether the latest step takes a snapshot behind a block with one of these hashes."""
        return any(block_hash in self._unpublished for block_hash in hashes) if self._unpublished else False

    def admit(self, request_id: RequestId, snapshot: int | None) -> None:
        """Gives a request a slot. Its state begins with the snapshot; None: with zeros, at the first token."""
        assert request_id not in self._slots, "a request was admitted twice"
        self._slots[request_id] = self._free_slots.pop()
        if snapshot is not None:
            self._load(request_id, snapshot)

    def adopt(self, request_id: RequestId, snapshot: int) -> None:
        """Has a running request continue from a snapshot at its next chunk."""
        self._drop_load(request_id)
        self._load(request_id, snapshot)

    def take_use(self, request: Request, start: int, stop: int, *, max_snapshot: int) -> StateUse:
        """Returns how the chunk [start, stop) uses states, and allocates its snapshots.

        Args:
            max_snapshot: Snapshots are taken of the first `max_snapshot` tokens at most; those have hashes. 0: none.
        """
        loaded = self._to_load.pop(request.request_id, None)
        if loaded is not None:
            self._in_use.append(loaded)
        taken = tuple(self._take_snapshots(request, start, min(stop, max_snapshot)))
        return StateUse(self._slots[request.request_id], loaded, taken)

    def add_drafts(
        self, request_id: RequestId, use: StateUse, start: int, num_drafts: int, *, publishes: bool
    ) -> StateUse:
        """Returns the states of a chunk of one token, `start`, to which drafts are appended.

        With `publishes`, a copy at the end of an interval becomes a snapshot if the draft before it is accepted.
        """
        distance = self._interval * self._block_size
        copies: dict[int, int] = {}
        # The state behind the last draft needs a copy only as a snapshot.
        for num_tokens in range(start + 1, start + num_drafts + 2):
            # The token before the drafts is known, and has its snapshot already.
            is_border = publishes and num_tokens > start + 1 and num_tokens % distance == 0
            if is_border and self.pool.num_free_blocks > 0:
                (copies[num_tokens],) = self.pool.allocate(1)
            elif num_tokens <= start + num_drafts:
                copies[num_tokens] = self._free_draft_states.pop()
        self._drafts[request_id] = copies
        return replace(use, taken=(*use.taken, *copies.items()))

    def settle_drafts(self, request: Request, num_tokens: int, *, publishes: bool) -> None:
        """Has a request continue behind its first `num_tokens` tokens, the last of which are accepted drafts.

        With `publishes`, snapshots behind accepted drafts can be found from now on; their blocks must have hashes.
        """
        # If all were accepted, the state is that behind the last draft, whether or not there is a copy of it.
        for num_seen, copy in self._drafts.pop(request.request_id, {}).items():
            if publishes and copy < self.pool.num_blocks and num_seen <= num_tokens:
                block_hash = request.block_hashes[num_seen // self._block_size - 1]
                if self.pool.find(block_hash) is None:
                    self.pool.publish(copy, block_hash)
            if num_seen == num_tokens:
                self._to_load[request.request_id] = copy
            else:
                self._release(copy)

    def begin_step(self) -> None:
        """Makes the snapshots of the latest step findable, and begins a list of new ones."""
        for block_hash, snapshot in self._unpublished.items():
            self.pool.publish(snapshot, block_hash)
        self._unpublished.clear()
        self._release_used()
        self.unproven.append([])

    def end_step(self) -> None:
        """Ends the oldest step without an end: its snapshots are taken."""
        del self.unproven[:1]

    def loads_of_steps(self, request_id: RequestId) -> bool:
        """Whether a request continues from a snapshot that a step without an end takes."""
        snapshot = self._to_load.get(request_id)
        return snapshot is not None and any(snapshot in step for step in self.unproven)

    def withdraw_steps(self) -> None:
        """Ends all steps because they failed: their snapshots hold anything."""
        self.pool.withdraw(chain(*self.unproven))
        self.unproven.clear()
        self._unpublished.clear()
        self._release_used()

    def reset(self) -> None:
        """Makes all snapshots unfindable, those of the latest step as well."""
        self._unpublished.clear()
        self.pool.reset()

    def free(self, request_id: RequestId) -> None:
        """Releases the slot of a request, which may have none."""
        self._drop_load(request_id)
        for copy in self._drafts.pop(request_id, {}).values():
            self._release(copy)
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)

    def check_integrity(self) -> None:
        """Raises AssertionError if slots or snapshots are held twice or lost."""
        assert sorted([*self._slots.values(), *self._free_slots]) == list(range(self._num_slots)), "slots disagree"
        assert self._to_load.keys() <= self._slots.keys(), "a snapshot is held for a request without a slot"
        of_drafts = chain.from_iterable(copies.values() for copies in self._drafts.values())
        held = [*self._to_load.values(), *self._in_use, *of_drafts]
        self.pool.check_integrity([copy] for copy in held if copy < self.pool.num_blocks)
        drafts = sorted([*self._free_draft_states, *(copy for copy in held if copy >= self.pool.num_blocks)])
        assert drafts == list(range(self.pool.num_blocks, self._num_copies)), "states of drafts disagree"
        assert self._drafts.keys() <= self._slots.keys(), "a request without a slot has drafts"

    def _load(self, request_id: RequestId, snapshot: int) -> None:
        self.pool.hold([snapshot])
        self._to_load[request_id] = snapshot

    def _drop_load(self, request_id: RequestId) -> None:
        snapshot = self._to_load.pop(request_id, None)
        if snapshot is not None:
            self._release(snapshot)

    def _release(self, copy: int) -> None:
        if copy < self.pool.num_blocks:
            self.pool.release([copy])
        else:
            self._free_draft_states.append(copy)

    def _release_used(self) -> None:
        used, self._in_use = self._in_use, []
        for copy in used:
            self._release(copy)

    def _take_snapshots(self, request: Request, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Allocates snapshots of the tokens (start, stop]; yields (number of tokens, snapshot)."""
        for index in range(start // self._block_size + 1, stop // self._block_size + 1):
            if not self._is_border(request, index):
                continue
            block_hash = request.block_hashes[index - 1]
            known = self.pool.find(block_hash)
            if known is not None:
                self._touch(known)
            elif block_hash not in self._unpublished and self.pool.num_free_blocks > 0:
                (snapshot,) = self.pool.allocate(1)
                self._in_use.append(snapshot)
                self._unpublished[block_hash] = snapshot
                self.unproven[-1].append(snapshot)
                yield index * self._block_size, snapshot

    def _is_border(self, request: Request, index: int) -> bool:
        """Whether a snapshot is taken of the request's first `index` blocks."""
        return index % self._interval == 0 or index == (request.num_prompt_tokens - 1) // self._block_size

    def _touch(self, snapshot: int) -> None:
        """Makes a snapshot the last one to be evicted."""
        self.pool.hold([snapshot])
        self.pool.release([snapshot])
