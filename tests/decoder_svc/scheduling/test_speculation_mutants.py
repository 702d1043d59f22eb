"""Faults seeded into what is done with drafts: the traffic model notices each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decoder_svc.scheduling.kv_cache.block_pool import BlockPool
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.kv_cache.kv_group import KVGroup
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SampledToken, ScheduledChunk
from decoder_svc.scheduling.speculation import Speculation
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.scheduling.mutation import NUM_SEEDS, Mutations, Patch
from tests.decoder_svc.scheduling.test_speculation import LIMITS, TwinTraffic
from tests.decoder_svc.scheduling.traffic import Traffic

mutation = Mutations()


@mutation
def computed_tokens_are_not_taken_back(patch: Patch) -> None:
    original = Speculation.settle

    def settle(self: Speculation, request: Request, chunk: ScheduledChunk, sampled: Any, num_taken: int) -> None:
        original(self, request, chunk, sampled, num_taken)
        request.num_computed_tokens = min(chunk.start + chunk.num_tokens, request.num_tokens)

    patch.setattr(Speculation, "settle", settle)


@mutation
def one_draft_too_many_counts_as_computed(patch: Patch) -> None:
    original = Speculation.settle

    def settle(self: Speculation, request: Request, chunk: ScheduledChunk, sampled: Any, num_taken: int) -> None:
        original(self, request, chunk, sampled, num_taken)
        request.num_computed_tokens += len(sampled) <= len(chunk.draft_ids)

    patch.setattr(Speculation, "settle", settle)


@mutation
def one_draft_too_many_is_accepted(patch: Patch) -> None:
    original = Scheduler._take

    def take(self: Scheduler, chunk: ScheduledChunk, sampled: list[SampledToken]) -> Any:
        if 0 < len(sampled) <= len(chunk.draft_ids):
            wrong = chunk.draft_ids[len(sampled) - 1]
            sampled = [*sampled[:-1], replace(sampled[-1], token_id=wrong), sampled[-1]]
        return original(self, chunk, sampled)

    patch.setattr(Scheduler, "_take", take)


@mutation
def an_accepted_draft_is_lost(patch: Patch) -> None:
    original = Scheduler._take

    def take(self: Scheduler, chunk: ScheduledChunk, sampled: list[SampledToken]) -> Any:
        return original(self, chunk, sampled[1:] if len(sampled) > 1 else sampled)

    patch.setattr(Scheduler, "_take", take)
    # Its own assertion would say so first.
    settle_without_a_look(patch)


def settle_without_a_look(patch: Patch) -> None:
    original = Speculation.settle

    def settle(self: Speculation, request: Request, chunk: ScheduledChunk, sampled: Any, num_taken: int) -> None:
        original(self, request, replace(chunk, draft_ids=tuple(one.token_id for one in sampled)), sampled, num_taken)

    patch.setattr(Speculation, "settle", settle)


@mutation
def a_block_with_a_rejected_draft_is_named(patch: Patch) -> None:
    """The token that was sampled in its place is known, but its keys and values are not there."""
    original = KVCacheManager.publish

    def publish(self: KVCacheManager, request: Request, num_tokens: int, **options: bool) -> None:
        is_settled = num_tokens == request.num_computed_tokens
        known = min(request.num_tokens, self.block_size * len(self.block_table(request.request_id)))
        original(self, request, known if is_settled else num_tokens, **options)

    patch.setattr(KVCacheManager, "publish", publish)


@mutation
def drafts_are_named_before_they_are_accepted(patch: Patch) -> None:
    original = Speculation._lengthened

    def lengthened(self: Speculation, chunk: ScheduledChunk, request: Request, draft_ids: tuple[int, ...]) -> Any:
        result = original(self, chunk, request, draft_ids)
        request.token_ids += draft_ids
        self._kv_cache.publish(request, request.num_tokens)
        del request.token_ids[-len(draft_ids) :]
        return result

    patch.setattr(Speculation, "_lengthened", lengthened)


@mutation
def blocks_of_rejected_drafts_are_kept(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "cut", lambda self, request: None)


@mutation
def the_layers_with_a_window_keep_blocks_of_rejected_drafts(patch: Patch) -> None:
    def cut(self: KVCacheManager, request: Request) -> None:
        self._full.cut(request.request_id, -(-request.num_computed_tokens // self.block_size))

    patch.setattr(KVCacheManager, "cut", cut)


@mutation
def the_runner_is_not_told_of_what_comes_for_blocks_that_were_cut(patch: Patch) -> None:
    original = KVGroup.cut

    def cut(self: KVGroup, request_id: Any, stop: int) -> None:
        told = self.tables[request_id].num_sent
        original(self, request_id, stop)
        self.tables[request_id].num_sent = told

    patch.setattr(KVGroup, "cut", cut)


@mutation
def drafts_take_cached_blocks(patch: Patch) -> None:
    patch.setattr(BlockPool, "num_unpublished_free_blocks", lambda self, at_most: min(at_most, self.num_free_blocks))


@mutation
def drafts_take_blocks_that_are_not_there(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "num_spare_tokens", lambda self, request, start, num_tokens: num_tokens)


@mutation
def drafts_ask_the_full_group_only(patch: Patch) -> None:
    def spare(self: KVCacheManager, request: Request, start: int, num_tokens: int) -> int:
        num_blocks = len(self.block_table(request.request_id))
        num_missing = max(0, -(-(start + num_tokens) // self.block_size) - num_blocks)
        num_blocks += self.pool.num_unpublished_free_blocks(num_missing)
        return min(num_tokens, num_blocks * self.block_size - start)

    patch.setattr(KVCacheManager, "num_spare_tokens", spare)


@mutation
def drafts_do_not_keep_to_the_budget(patch: Patch) -> None:
    original = Speculation.add_drafts
    patch.setattr(
        Speculation, "add_drafts", lambda self, chunks, requests, token_budget: original(self, chunks, requests, 9)
    )


@mutation
def drafts_come_before_those_who_wait(patch: Patch) -> None:
    original = Scheduler._schedule_running

    def schedule_running(self: Scheduler, step: Any) -> None:
        original(self, step)
        self.speculation.add_drafts(step.chunks, self._requests, step.token_budget)
        step.token_budget -= sum(len(chunk.draft_ids) for chunk in step.chunks)

    patch.setattr(Scheduler, "_schedule_running", schedule_running)


@mutation
def guesses_go_beyond_the_end_of_the_answer(patch: Patch) -> None:
    original = Speculation._room

    def room(self: Speculation, request: Request) -> int:
        params, request.params = request.params, replace(request.params, max_tokens=request.params.max_tokens + 2)
        try:
            return original(self, request)
        finally:
            request.params = params

    patch.setattr(Speculation, "_room", room)


def run_all_seeds() -> None:
    for seed in range(NUM_SEEDS):
        for window in (None, Window(5)):
            Traffic(seed, window=window, speculation=LIMITS).run(120)
    for seed in range(6):
        TwinTraffic(seed, speculation=LIMITS).run(100)


def test_nothing_is_noticed_where_nothing_is_wrong() -> None:
    run_all_seeds()


@pytest.mark.parametrize("name", sorted(mutation))
def test_traffic_with_drafts_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation[name](monkeypatch)
    with pytest.raises(AssertionError):
        run_all_seeds()
