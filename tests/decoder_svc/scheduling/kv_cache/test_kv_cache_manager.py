from __future__ import annotations

from decoder_svc.scheduling.kv_cache.kv_cache_manager import NO_HIT, KVCacheManager
from decoder_svc.scheduling.request import CacheScope
from tests.decoder_svc.scheduling.simulation import fill, image, request


def test_questions_about_blocks_change_nothing() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    one = request("a", 9)
    assert manager.find_prefix(one) == NO_HIT
    assert manager.can_admit(one, NO_HIT)
    assert not manager.can_admit(request("b", 17), NO_HIT)
    manager.admit(one, NO_HIT)
    assert manager.num_blocks_missing(one, 9) == 3
    assert manager.can_allocate(one, 16)
    assert not manager.can_allocate(one, 17)
    assert manager.usage == 0
    manager.allocate(one, 9)
    one.num_computed_tokens = 9
    assert manager.num_blocks_missing(one, 3) == 0
    assert len(manager.block_table(one.request_id)) == 3
    manager.free(one.request_id)
    manager.free(one.request_id)
    manager.check_integrity()
    assert manager.usage == 0


def test_table_changes_are_told_once_and_in_full() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    one = request("a", 9)
    manager.admit(one, NO_HIT)
    manager.allocate(one, 5)
    table = manager.block_table(one.request_id)
    assert manager.take_table_changes(one.request_id) == (0, table)
    one.num_computed_tokens = 5
    manager.allocate(one, 4)
    assert manager.take_table_changes(one.request_id) == (2, manager.block_table(one.request_id)[2:])
    assert manager.take_table_changes(one.request_id) == (3, ())


def test_a_request_in_its_prompt_adopts_blocks_computed_by_others() -> None:
    manager = KVCacheManager(num_blocks=16, block_size=4)
    slow, fast = request("slow", 15, text="same"), request("fast", 14, text="same")
    manager.admit(slow, NO_HIT)
    manager.allocate(slow, 6)
    manager.take_table_changes(slow.request_id)
    slow.num_computed_tokens = 6
    fill(manager, fast)
    assert manager.may_find_more(slow)
    hit = manager.find_more(slow)
    assert (hit.num_tokens, hit.block_ids) == (12, manager.block_table(fast.request_id)[1:3])
    num_free = manager.pool.num_free_blocks
    manager.adopt(slow, hit)
    assert manager.pool.num_free_blocks == num_free + 1
    assert manager.take_table_changes(slow.request_id) == (1, hit.block_ids)
    assert manager.num_shared_tokens(slow.request_id) == 12
    manager.check_integrity()
    slow.num_computed_tokens = 12
    assert not manager.may_find_more(slow)


def test_twelve_of_sixteen_blocks_cached_cost_four() -> None:
    manager = KVCacheManager(num_blocks=40, block_size=4)
    fill(manager, request("a", 48, text="same"))
    late = request("b", 64, text="same")
    hit = manager.find_prefix(late)
    assert len(hit.block_ids) == 12
    assert manager.num_blocks_for_admission(late, hit) == 4


def test_a_hit_on_free_blocks_costs_themselves_once() -> None:
    """vLLM #7883, step 1.b: what is cached but free is neither free of charge nor charged twice."""
    manager = KVCacheManager(num_blocks=16, block_size=4)
    early = request("a", 48, text="same")
    fill(manager, early)
    manager.free(early.request_id)
    late = request("b", 64, text="same")
    hit = manager.find_prefix(late)
    assert manager.pool.num_free_blocks == 16
    assert manager.num_blocks_for_admission(late, hit) == 16
    fill(manager, late)
    assert manager.pool.num_free_blocks == 0


def test_a_fully_cached_prompt_computes_one_token_and_takes_no_block() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    fill(manager, request("a", 12, text="same"))
    again = request("b", 12, text="same")
    hit = fill(manager, again)
    assert hit.num_tokens == 11
    assert len(hit.block_ids) == 3
    assert manager.block_table(again.request_id) == hit.block_ids
    assert manager.pool.num_free_blocks == 5


def test_a_prompt_that_ends_inside_a_block_computes_the_tokens_outside_full_blocks() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    fill(manager, request("a", 11, text="same"))
    hit = manager.find_prefix(request("b", 11, text="same"))
    assert (hit.num_tokens, len(hit.block_ids)) == (8, 2)


def test_deterministic_mode_computes_the_last_block_again_and_shares_prompts_only() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4, deterministic=True)
    one = request("a", 8, text="same")
    fill(manager, one)
    hit = manager.find_prefix(request("b", 8, text="same"))
    assert (hit.num_tokens, len(hit.block_ids)) == (4, 1)
    one.token_ids += [1, 2, 3, 4]
    manager.allocate(one, 4)
    manager.publish(one, 12)
    assert manager.pool.num_published_blocks == 2


def test_only_full_blocks_are_found_and_only_as_far_as_scheduled() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    one = request("a", 8, text="same")
    manager.admit(one, NO_HIT)
    manager.allocate(one, 8)
    table = list(manager.block_table(one.request_id))
    manager.publish(one, 3)
    assert manager.pool.num_published_blocks == 0
    assert manager.find_prefix(request("b", 9, text="same")) == NO_HIT
    manager.publish(one, 5)
    assert manager.find_prefix(request("c", 9, text="same")).block_ids == tuple(table[:1])
    manager.publish(one, 8)
    assert manager.find_prefix(request("d", 9, text="same")).block_ids == tuple(table)


def test_names_of_a_failed_step_are_withdrawn() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    one = request("a", 8, text="same")
    manager.admit(one, NO_HIT)
    manager.allocate(one, 8)
    manager.publish(one, 4)
    manager.begin_step()
    manager.publish(one, 8)
    manager.withdraw_steps()
    assert manager.find_prefix(request("b", 9, text="same")).num_tokens == 4
    manager.check_integrity()


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    one = request("a", 6, text="same")
    fill(manager, one)
    one.token_ids += [90, 91, 92]
    manager.allocate(one, 3)
    manager.publish(one, 9)
    next_turn = request("b", 12, text="same")
    next_turn.token_ids[6:9] = [90, 91, 92]
    assert manager.find_prefix(next_turn).num_tokens == 8


def test_another_image_or_salt_is_no_hit_and_bypass_does_not_look() -> None:
    manager = KVCacheManager(num_blocks=16, block_size=4)
    fill(manager, request("a", 12, (image("x", 4, 6),), text="same"))
    assert manager.find_prefix(request("b", 13, (image("x", 4, 6),), text="same")).num_tokens == 12
    assert manager.find_prefix(request("c", 13, (image("y", 4, 6),), text="same")).num_tokens == 4
    for scope in (CacheScope(salt=b"s"), CacheScope(bypass=True)):
        assert manager.find_prefix(request("d", 13, (image("x", 4, 6),), text="same", cache_scope=scope)) == NO_HIT


def test_statistics_count_first_admissions_and_not_those_after_a_preemption() -> None:
    manager = KVCacheManager(num_blocks=16, block_size=4)
    fill(manager, request("a", 12, text="same"))
    again = request("b", 14, text="same")
    for _ in range(3):
        manager.find_prefix(again)
    fill(manager, again)
    stats = manager.stats
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (26, 12)
    manager.free(again.request_id)
    again.num_preemptions = 1
    fill(manager, again)
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (26, 12)


def test_reset_forgets_and_running_requests_go_on() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    one = request("a", 8, text="same")
    fill(manager, one)
    manager.reset_prefix_cache()
    assert manager.find_prefix(request("b", 9, text="same")) == NO_HIT
    one.token_ids += [1, 2, 3, 4]
    manager.allocate(one, 4)
    manager.publish(one, 12)
    manager.check_integrity()


def test_without_sharing_nothing_is_hashed_or_found() -> None:
    manager = KVCacheManager(num_blocks=20, block_size=4, is_shared=False)
    one, other = request("a", 16), request("b", 16)
    assert fill(manager, one) == NO_HIT
    assert fill(manager, other) == NO_HIT
    assert one.block_hashes == other.block_hashes == []
    assert manager.num_shared_tokens(one.request_id) == 0
