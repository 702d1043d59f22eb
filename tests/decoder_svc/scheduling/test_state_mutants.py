"""Faults seeded into the group of recurrent layers: the traffic model notices each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decoder_svc.scheduling.kv_cache.block_pool import BlockPool
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.kv_cache.state_group import StateGroup, StateGroupSize
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import StateUse
from decoder_svc.scheduling.speculation import SpeculationLimits
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.scheduling.mutation import NUM_SEEDS, Mutations, Patch
from tests.decoder_svc.scheduling.traffic import MAX_NUM_SEQS, Traffic

mutation = Mutations()


@mutation
def a_hit_does_not_ask_for_a_snapshot(patch: Patch) -> None:
    patch.setattr(StateGroup, "find_last", lambda self, hashes, start, stop: (stop, 0))


@mutation
def a_hit_ends_where_the_blocks_end(patch: Patch) -> None:
    original = StateGroup.find_last

    def find_last(self: StateGroup, hashes: Any, start: int, stop: int) -> tuple[int, int | None]:
        index, snapshot = original(self, hashes, start, stop)
        return (stop if snapshot is not None else index), snapshot

    patch.setattr(StateGroup, "find_last", find_last)


@mutation
def a_state_goes_back_by_one_token(patch: Patch) -> None:
    """A prompt that is cached up to its last token computes that token again, from the state behind it."""
    original = KVCacheManager._find_from

    def find(self: KVCacheManager, request: Request, index: int) -> Any:
        request.num_unknown_tokens += 1
        try:
            return original(self, request, index)
        finally:
            request.num_unknown_tokens -= 1

    patch.setattr(KVCacheManager, "_find_from", find)


@mutation
def an_adopted_prefix_brings_no_state(patch: Patch) -> None:
    patch.setattr(StateGroup, "adopt", lambda self, request_id, snapshot: None)


@mutation
def a_snapshot_is_found_in_the_step_that_takes_it(patch: Patch) -> None:
    original = StateGroup.take_use

    def take_use(self: StateGroup, *arguments: Any, **keywords: Any) -> Any:
        use = original(self, *arguments, **keywords)
        for block_hash, snapshot in self._unpublished.items():
            self.pool.publish(snapshot, block_hash)
        self._unpublished.clear()
        return use

    patch.setattr(StateGroup, "take_use", take_use)


@mutation
def a_snapshot_that_is_read_is_let_go_at_once(patch: Patch) -> None:
    original = StateGroup.take_use

    def take_use(self: StateGroup, request: Request, *arguments: Any, **keywords: Any) -> Any:
        loaded = self._to_load.get(request.request_id)
        use = original(self, request, *arguments, **keywords)
        if loaded is not None and loaded < self.pool.num_blocks:
            self._in_use.remove(loaded)
            self.pool.release([loaded])
            self.pool._free.move_to_end(loaded, last=False)
        return use

    patch.setattr(StateGroup, "take_use", take_use)


@mutation
def a_snapshot_is_taken_one_block_late(patch: Patch) -> None:
    original = StateGroup._take_snapshots

    def take(self: StateGroup, request: Request, start: int, stop: int) -> Any:
        for num_tokens, snapshot in original(self, request, start, stop):
            yield min(stop, num_tokens + self._block_size), snapshot

    patch.setattr(StateGroup, "_take_snapshots", take)


@mutation
def snapshots_of_a_failed_step_stay(patch: Patch) -> None:
    def withdraw_steps(self: StateGroup) -> None:
        self.unproven.clear()

    patch.setattr(StateGroup, "withdraw_steps", withdraw_steps)


@mutation
def a_slot_is_given_to_two_requests(patch: Patch) -> None:
    original = StateGroup.admit

    def admit(self: StateGroup, request_id: Any, snapshot: int | None) -> None:
        original(self, request_id, snapshot)
        self._slots[request_id] = 0

    patch.setattr(StateGroup, "admit", admit)


@mutation
def a_slot_is_lost_when_a_request_ends(patch: Patch) -> None:
    patch.setattr(StateGroup, "free", lambda self, request_id: self._slots.pop(request_id, None) and None)


@mutation
def a_request_that_ends_before_its_chunk_keeps_its_snapshot(patch: Patch) -> None:
    patch.setattr(StateGroup, "_drop_load", lambda self, request_id: self._to_load.pop(request_id, None) and None)


@mutation
def a_step_runs_ahead_of_a_corrected_token(patch: Patch) -> None:
    patch.setattr(Scheduler, "may_run_ahead", lambda self, output: True)


@mutation
def a_snapshot_keeps_its_hash_when_it_is_taken_again(patch: Patch) -> None:
    original = BlockPool._forget

    def forget(self: BlockPool, block: int) -> None:
        if self.num_blocks != NUM_SNAPSHOTS:
            original(self, block)

    patch.setattr(BlockPool, "_forget", forget)


@mutation
def a_request_continues_behind_rejected_drafts(patch: Patch) -> None:
    original = StateGroup.settle_drafts

    def settle(self: StateGroup, request: Request, num_tokens: int, **keywords: Any) -> None:
        original(self, request, num_tokens, **keywords)
        self._drop_load(request.request_id)

    patch.setattr(StateGroup, "settle_drafts", settle)


@mutation
def a_request_continues_one_draft_early(patch: Patch) -> None:
    original = StateGroup.settle_drafts

    def settle(self: StateGroup, request: Request, num_tokens: int, **keywords: Any) -> None:
        original(self, request, num_tokens - 1, **keywords)

    patch.setattr(StateGroup, "settle_drafts", settle)


@mutation
def snapshots_behind_rejected_drafts_are_found(patch: Patch) -> None:
    """Their blocks have no hashes yet, so the last one that there is stands for them."""

    def settle(self: StateGroup, request: Request, num_tokens: int, *, publishes: bool) -> None:
        for num_seen, copy in self._drafts.pop(request.request_id, {}).items():
            if publishes and copy < self.pool.num_blocks:
                index = min(num_seen // self._block_size, len(request.block_hashes)) - 1
                self.pool.publish(copy, request.block_hashes[index])
            if num_seen == num_tokens:
                self._to_load[request.request_id] = copy
            else:
                self._release(copy)

    patch.setattr(StateGroup, "settle_drafts", settle)


@mutation
def copies_for_drafts_are_taken_one_token_late(patch: Patch) -> None:
    original = StateGroup.add_drafts

    def add_drafts(self: StateGroup, request_id: Any, use: StateUse, *arguments: Any, **keywords: Any) -> StateUse:
        late = original(self, request_id, use, *arguments, **keywords)
        own = len(use.taken)
        return replace(late, taken=late.taken[:own] + tuple((number + 1, copy) for number, copy in late.taken[own:]))

    patch.setattr(StateGroup, "add_drafts", add_drafts)


@mutation
def a_copy_that_a_request_continues_is_given_away(patch: Patch) -> None:
    original = StateGroup.settle_drafts

    def settle(self: StateGroup, request: Request, num_tokens: int, **keywords: Any) -> None:
        original(self, request, num_tokens, **keywords)
        copy = self._to_load.get(request.request_id)
        if copy is not None and copy >= self.pool.num_blocks:
            self._free_draft_states.append(copy)

    patch.setattr(StateGroup, "settle_drafts", settle)


@mutation
def copies_of_a_request_that_ends_are_lost(patch: Patch) -> None:
    original = StateGroup.free

    def free(self: StateGroup, request_id: Any) -> None:
        if request_id in self._drafts:
            self._drafts[request_id] = {}
        original(self, request_id)

    patch.setattr(StateGroup, "free", free)


@mutation
def a_hit_that_layers_with_a_window_shorten_keeps_its_snapshot(patch: Patch) -> None:
    find_from, original = KVCacheManager._find_from, StateGroup.find_last
    found: list[int | None] = []

    def find(self: KVCacheManager, request: Request, index: int) -> Any:
        found.clear()
        return find_from(self, request, index)

    def find_last(self: StateGroup, hashes: Any, start: int, stop: int) -> tuple[int, int | None]:
        index, snapshot = original(self, hashes, start, stop)
        found.append(snapshot)
        return index, found[0]

    patch.setattr(KVCacheManager, "_find_from", find)
    patch.setattr(StateGroup, "find_last", find_last)


@mutation
def layers_with_a_window_are_not_asked_beside_recurrent_ones(patch: Patch) -> None:
    original = KVCacheManager._find_sliding

    def find(self: KVCacheManager, sliding: Any, request: Request, index: int, stop: int) -> tuple[int, list[int]]:
        return (stop, []) if self._states is not None else original(self, sliding, request, index, stop)

    patch.setattr(KVCacheManager, "_find_sliding", find)


NUM_SNAPSHOTS = 3


def run_all_seeds() -> None:
    states = StateGroupSize(MAX_NUM_SEQS, NUM_SNAPSHOTS, 1, num_draft_states=4)
    # With many snapshots, layers with a window lose their blocks first.
    many = replace(states, num_snapshots=20)
    for seed in range(NUM_SEEDS):
        Traffic(seed, states=states).run(120)
        Traffic(seed, states=states, overlaps=True).run(120)
        Traffic(seed, states=states, speculation=SpeculationLimits(3)).run(120)
        Traffic(seed, states=many, window=Window(5, is_chunked=seed % 2 == 1)).run(120)


def test_nothing_is_noticed_where_nothing_is_wrong() -> None:
    run_all_seeds()


@pytest.mark.parametrize("name", sorted(mutation))
def test_traffic_with_states_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation[name](monkeypatch)
    with pytest.raises(AssertionError):
        run_all_seeds()
