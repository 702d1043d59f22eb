"""Faults seeded into what layers with a window keep: the traffic model notices each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.kv_cache.kv_group import KVGroup
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.window import Window
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.mutation import NUM_SEEDS, Mutations, Patch
from tests.decoder_svc.scheduling.traffic import Traffic

mutation = Mutations()


def narrowed(window: Window) -> Window:
    """A window that is one token smaller."""
    return replace(window, size=window.size - 1)


@mutation
def sliding_windows_are_chunks_of_the_sequence(patch: Patch) -> None:
    original = Prompt.first_seen
    patch.setattr(
        Prompt, "first_seen", lambda self, start, window: original(self, start, replace(window, is_chunked=True))
    )


@mutation
def the_window_is_one_token_too_short(patch: Patch) -> None:
    original = Prompt.first_seen
    patch.setattr(Prompt, "first_seen", lambda self, start, window: original(self, start, narrowed(window)))


@mutation
def a_prompt_that_sees_itself_does_so_within_the_window(patch: Patch) -> None:
    patch.setattr(Prompt, "first_seen", lambda self, start, window: window.first_seen(start))


@mutation
def the_window_is_that_of_the_chunks_last_token(patch: Patch) -> None:
    original = Scheduler._schedule_chunk

    def schedule_chunk(self: Scheduler, request: Request, num_tokens: int, step: Any) -> None:
        request.num_computed_tokens += num_tokens - 1
        self.kv_cache.release_unseen(request)
        request.num_computed_tokens -= num_tokens - 1
        original(self, request, num_tokens, step)

    patch.setattr(Scheduler, "_schedule_chunk", schedule_chunk)


@mutation
def a_hit_does_not_ask_the_layers_with_a_window(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "_find_sliding", lambda self, sliding, request, index, stop: (stop, []))


@mutation
def a_hit_is_content_with_the_last_block_of_the_window(patch: Patch) -> None:
    def find(self: KVCacheManager, sliding: KVGroup, request: Request, index: int, stop: int) -> tuple[int, list[int]]:
        blocks = sliding.find_run_before(request.block_hashes, index, stop)
        return (stop, blocks) if blocks else (index, [])

    patch.setattr(KVCacheManager, "_find_sliding", find)


@mutation
def a_hit_ends_where_the_full_group_ends(patch: Patch) -> None:
    original = KVCacheManager._find_sliding

    def find(self: KVCacheManager, sliding: KVGroup, request: Request, index: int, stop: int) -> tuple[int, list[int]]:
        found, blocks = original(self, sliding, request, index, stop)
        return (stop, blocks) if blocks else (found, blocks)

    patch.setattr(KVCacheManager, "_find_sliding", find)


@mutation
def what_was_let_go_stays_in_the_table(patch: Patch) -> None:
    patch.setattr(KVGroup, "release_before", lambda self, request_id, index: None)


@mutation
def what_was_let_go_is_freed_again_at_the_end(patch: Patch) -> None:
    def release_before(self: KVGroup, request_id: Any, index: int) -> None:
        table = self.tables[request_id]
        self.pool.release(table.blocks[: max(0, index - table.first)])

    patch.setattr(KVGroup, "release_before", release_before)


@mutation
def room_is_asked_of_the_full_group_only(patch: Patch) -> None:
    def can_allocate(self: KVCacheManager, request: Request, num_new_tokens: int) -> bool:
        return self.num_blocks_missing(request, num_new_tokens) <= self.pool.num_free_blocks

    patch.setattr(KVCacheManager, "can_allocate", can_allocate)


@mutation
def the_layers_with_a_window_keep_the_names_of_a_failed_step(patch: Patch) -> None:
    def withdraw_steps(self: KVCacheManager) -> None:
        self.pool.withdraw(block for step in self._full.unproven for block in step)

    patch.setattr(KVCacheManager, "withdraw_steps", withdraw_steps)


@mutation
def the_runner_is_not_told_of_adopted_blocks_of_the_window(patch: Patch) -> None:
    original = KVGroup.adopt

    def adopt(self: KVGroup, request_id: Any, index: int, found: Any, stop: int) -> None:
        table = self.tables[request_id]
        told = table.num_sent
        original(self, request_id, index, found, stop)
        if self._window is not None:
            table.num_sent = told

    patch.setattr(KVGroup, "adopt", adopt)


def run_all_seeds() -> None:
    for seed in range(NUM_SEEDS):
        for mask in Mask:
            Traffic(seed, window=Window(5, is_chunked=seed % 2 == 1), mask=mask).run(120)


def test_nothing_is_noticed_where_nothing_is_wrong() -> None:
    run_all_seeds()


@pytest.mark.parametrize("name", sorted(mutation))
def test_traffic_with_a_window_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation[name](monkeypatch)
    with pytest.raises(AssertionError):
        run_all_seeds()
