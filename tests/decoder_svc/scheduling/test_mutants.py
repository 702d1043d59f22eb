"""Faults put into the scheduler on purpose: traffic must notice each of them, or it would not notice a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decoder_svc.scheduling import scheduler
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache import block_hash
from decoder_svc.scheduling.kv_cache.block_hash import BlockHasher
from decoder_svc.scheduling.kv_cache.block_pool import BlockPool
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager, PrefixHit
from decoder_svc.scheduling.kv_cache.kv_group import KVGroup
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import CacheScope, Request
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import StepInProgress
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.mutation import NUM_SEEDS, Mutations, Patch
from tests.decoder_svc.scheduling.simulation import request
from tests.decoder_svc.scheduling.traffic import Traffic, masked, steps_until_served

# In these, a request adopts blocks of a step that fails, and has no chunk in it.
SEEDS_OF_RARE_CASES = (58, 245)

mutation = Mutations()


def replace_result(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`owner.name(self, …)` returns `change(result, self, …)` from now on."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments: change(original(*arguments), *arguments))


@mutation
def blocks_are_published_before_they_are_full(patch: Patch) -> None:
    original = KVCacheManager.publish
    patch.setattr(
        KVCacheManager,
        "publish",
        lambda self, request, num_tokens, **options: original(
            self,
            request,
            min(num_tokens + 3, request.num_tokens, 4 * len(self.block_table(request.request_id))),
            **options,
        ),
    )


@mutation
def hits_on_free_blocks_are_free_of_charge(patch: Patch) -> None:
    patch.setattr(
        KVCacheManager,
        "num_blocks_for_admission",
        lambda self, request, hit: -(-request.num_tokens // self.block_size) - len(hit.block_ids),
    )


@mutation
def the_salt_is_not_in_the_hash(patch: Patch) -> None:
    without(patch, "salt")


@mutation
def the_adapter_is_not_in_the_hash(patch: Patch) -> None:
    without(patch, "adapter")


def without(patch: Patch, field: str) -> None:
    original = block_hash._extra_keys

    def extra_keys(request: Request, start: int, stop: int) -> bytes:
        scope = request.cache_scope
        request.cache_scope = CacheScope(**{"salt": scope.salt, "adapter": scope.adapter} | {field: None})  # type: ignore[arg-type]
        try:
            return original(request, start, stop)
        finally:
            request.cache_scope = scope

    patch.setattr(block_hash, "_extra_keys", extra_keys)


@mutation
def the_image_is_not_in_the_hash(patch: Patch) -> None:
    patch.setattr(block_hash, "_images_between", lambda request, start, stop: iter(()))


@mutation
def the_offset_is_not_in_the_hash(patch: Patch) -> None:
    def extra_keys(request: Request, start: int, stop: int) -> bytes:
        keys = b"".join(item.key.value for item in block_hash._images_between(request, start, stop))
        return keys + request.cache_scope.salt + repr(request.cache_scope.adapter).encode()

    patch.setattr(block_hash, "_extra_keys", extra_keys)


@mutation
def the_parent_is_not_in_the_hash(patch: Patch) -> None:
    original = BlockHasher._hash
    patch.setattr(BlockHasher, "_hash", lambda self, parent, request, index: original(self, b"", request, index))


@mutation
def a_full_hit_leaves_nothing_to_compute(patch: Patch) -> None:
    def change(hit: PrefixHit, manager: KVCacheManager, request: Request) -> PrefixHit:
        return PrefixHit(hit.block_ids, len(hit.block_ids) * manager.block_size)

    replace_result(patch, KVCacheManager, "find_prefix", change)


@mutation
def a_full_hit_is_written_again(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "num_shared_tokens", lambda self, request_id: 0)


@mutation
def a_found_block_stays_in_the_free_list(patch: Patch) -> None:
    def hold(self: BlockPool, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._num_holders[block] += 1

    patch.setattr(BlockPool, "hold", hold)


@mutation
def a_reused_block_keeps_its_name(patch: Patch) -> None:
    patch.setattr(BlockPool, "_forget", lambda self, block: None)


@mutation
def one_of_two_equal_blocks_takes_the_name_with_it(patch: Patch) -> None:
    def forget(self: BlockPool, block: int) -> None:
        name = self._hashes[block]
        self._hashes[block] = None
        if name is not None:
            self._blocks_by_hash.pop(name, None)

    patch.setattr(BlockPool, "_forget", forget)


@mutation
def names_of_a_failed_step_stay(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "withdraw_steps", lambda self: None)


@mutation
def who_adopted_blocks_of_a_failed_step_keeps_them(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "holds_any_of_steps", lambda self, request_id: False)


@mutation
def the_runner_is_not_told_of_adopted_blocks(patch: Patch) -> None:
    original = KVGroup.adopt

    def adopt(self: KVGroup, request_id: Any, index: int, found: Any, stop: int) -> None:
        table = self.tables[request_id]
        told = table.num_sent
        original(self, request_id, index, found, stop)
        table.num_sent = told

    patch.setattr(KVGroup, "adopt", adopt)


@mutation
def own_blocks_are_kept_when_others_are_adopted(patch: Patch) -> None:
    original = BlockPool.release
    adopting: list[bool] = []
    adopt = KVCacheManager.adopt

    def adopt_and_keep(self: KVCacheManager, request: Request, hit: PrefixHit) -> None:
        adopting.append(True)
        adopt(self, request, hit)
        adopting.clear()

    patch.setattr(KVCacheManager, "adopt", adopt_and_keep)
    patch.setattr(BlockPool, "release", lambda self, blocks: None if adopting else original(self, blocks))


@mutation
def rows_on_their_way_count_as_there(patch: Patch) -> None:
    def first_missing(missing: int | None, cache: EncoderCacheManager, key: Any, rows: Any) -> int | None:
        unasked = cache.unasked(key, rows)
        return unasked[0].start if unasked else None

    replace_result(patch, EncoderCacheManager, "first_missing_row", first_missing)


@mutation
def evicted_rows_still_count(patch: Patch) -> None:
    original = EncoderCacheManager._evict

    def evict(self: EncoderCacheManager, key: Any, entry: Any, rows: Any) -> None:
        original(self, key, entry, rows)
        self._num_reserved_rows += len(rows)

    patch.setattr(EncoderCacheManager, "_evict", evict)


@mutation
def evictions_are_not_told(patch: Patch) -> None:
    replace_result(patch, EncoderCacheManager, "take_evicted", lambda evicted, cache: ())


@mutation
def rows_in_use_are_evicted(patch: Patch) -> None:
    patch.setattr(EncoderCacheManager, "need", lambda self, key, user, rows: None)


@mutation
def an_aborted_request_keeps_its_pins(patch: Patch) -> None:
    original = Scheduler.abort

    def abort(self: Scheduler, request_id: Any) -> Request | None:
        with Patch.context() as inner:
            inner.setattr(EncoderCacheManager, "release", lambda *arguments: None)
            return original(self, request_id)

    patch.setattr(Scheduler, "abort", abort)


@mutation
def an_aborted_request_keeps_its_blocks(patch: Patch) -> None:
    original = Scheduler.abort

    def abort(self: Scheduler, request_id: Any) -> Request | None:
        with Patch.context() as inner:
            inner.setattr(KVCacheManager, "free", lambda *arguments: None)
            return original(self, request_id)

    patch.setattr(Scheduler, "abort", abort)


@mutation
def a_preempted_request_thinks_it_was_computed(patch: Patch) -> None:
    original = Scheduler._preempt

    def preempt(self: Scheduler, request: Request) -> None:
        num_computed = request.num_computed_tokens
        original(self, request)
        request.num_computed_tokens = num_computed

    patch.setattr(Scheduler, "_preempt", preempt)
    patch.setattr(Scheduler, "_take_over", lambda self, request, num_tokens: None)


@mutation
def the_token_budget_is_not_spent(patch: Patch) -> None:
    original = Scheduler._schedule_chunk

    def schedule_chunk(self: Scheduler, request: Request, num_tokens: int, step: Any) -> None:
        original(self, request, num_tokens, step)
        step.token_budget += num_tokens

    patch.setattr(Scheduler, "_schedule_chunk", schedule_chunk)


@mutation
def a_chunk_may_end_where_tokens_see_each_other(patch: Patch) -> None:
    patch.setattr(Prompt, "last_cut", lambda self, start, stop: stop)


@mutation
def the_prompt_is_not_in_the_hash(patch: Patch) -> None:
    patch.setattr(block_hash, "_prompt_digest", lambda prompt: b"")


@mutation
def who_cannot_be_cut_is_overtaken(patch: Patch) -> None:
    class HeedlessStep(StepInProgress):
        lacks_budget = property(lambda self: False, lambda self, value: None)

    patch.setattr(scheduler, "StepInProgress", HeedlessStep)


def run_all_seeds() -> None:
    for seed in range(NUM_SEEDS):
        Traffic(seed).run(120)
    for seed in range(NUM_SEEDS // 2):
        Traffic(seed, mask=Mask.IMAGE).run(120)
        Traffic(seed, mask=Mask.PROMPT).run(120)
    for seed in SEEDS_OF_RARE_CASES:
        Traffic(seed, mask=Mask.IMAGE).run(120)
    uncut = masked(request("w", 16, arrival_s=1), Mask.PROMPT)
    steps_until_served(uncut, lambda index: request(f"n{index}", 80, arrival_s=2 * index), 50)


def test_nothing_is_noticed_where_nothing_is_wrong() -> None:
    run_all_seeds()


@pytest.mark.parametrize("name", sorted(mutation))
def test_traffic_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation[name](monkeypatch)
    with pytest.raises(AssertionError):
        run_all_seeds()


def test_there_are_enough_mutations() -> None:
    assert len(mutation) >= 12
