from __future__ import annotations

from decoder_svc.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from decoder_svc.kv_group import SlidingGroupSize
from decoder_svc.request import CacheScope, Request
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling import image, request


def with_window(window: int, num_blocks: int = 32, num_sliding_blocks: int = 32, most: int = 12) -> KVCacheManager:
    """Blocks of four tokens for layers that see everything, and for layers with a window."""
    return KVCacheManager(num_blocks, 4, sliding=SlidingGroupSize(window, num_sliding_blocks, most))


def let_go_of_names(manager: KVCacheManager, one: Request, indexes: range) -> None:
    """The room of these blocks of the sliding group is needed for something else."""
    assert manager.sliding_pool is not None
    found = [manager.sliding_pool.find(one.block_hashes[index]) for index in indexes]
    manager.sliding_pool.withdraw([block for block in found if block is not None])


def fill(manager: KVCacheManager, one: Request) -> PrefixHit:
    """Admits a request and computes all its tokens; returns what was found for it."""
    hit = manager.find_prefix(one)
    assert manager.can_admit(one, hit)
    manager.admit(one, hit)
    one.num_computed_tokens = hit.num_tokens
    manager.allocate(one, one.num_tokens - hit.num_tokens)
    one.num_computed_tokens = one.num_tokens
    manager.publish(one, one.num_tokens)
    manager.release_unseen(one)
    manager.check_integrity()
    return hit


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


def test_a_request_in_its_prompt_adopts_what_others_computed() -> None:
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


def test_a_prompt_that_ends_inside_a_block_computes_what_is_not_in_full_blocks() -> None:
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
    assert manager.pool.num_named_blocks == 2


def test_only_full_blocks_are_found_and_only_as_far_as_scheduled() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    one = request("a", 8, text="same")
    manager.admit(one, NO_HIT)
    manager.allocate(one, 8)
    table = list(manager.block_table(one.request_id))
    manager.publish(one, 3)
    assert manager.pool.num_named_blocks == 0
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
    manager.withdraw_step()
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


def test_statistics_count_admissions_and_keep_preempted_ones_apart() -> None:
    manager = KVCacheManager(num_blocks=16, block_size=4)
    fill(manager, request("a", 12, text="same"))
    again = request("b", 14, text="same")
    for _ in range(3):
        manager.find_prefix(again)
    fill(manager, again)
    stats = manager.stats
    assert (stats.num_queries, stats.num_query_tokens, stats.num_hit_tokens) == (2, 26, 12)
    manager.free(again.request_id)
    again.num_preemptions = 1
    fill(manager, again)
    assert (stats.num_queries, stats.num_preempted_queries, stats.num_preempted_hit_tokens) == (2, 1, 12)


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


def test_blocks_that_nobody_sees_are_let_go_and_still_found() -> None:
    manager = with_window(6)
    one = request("a", 40, text="same")
    manager.admit(one, NO_HIT)
    manager.allocate(one, 20)
    manager.publish(one, 20)
    assert manager.sliding_block_table(one.request_id)[0] == 0, "the chunk's first token sees its window"
    one.num_computed_tokens = 20
    manager.release_unseen(one)
    # Token 20 sees 15 … 20; blocks 0 … 2 hold 0 … 11, block 3 token 15.
    first, blocks = manager.sliding_block_table(one.request_id)
    assert (first, len(blocks)) == (3, 2)
    assert len(manager.block_table(one.request_id)) == 5
    assert manager.sliding_pool is not None
    assert manager.sliding_pool.num_free_blocks == 30
    assert manager.sliding_pool.num_named_blocks == 5
    assert manager.find_prefix(request("b", 9, text="same")).num_tokens == 8
    manager.check_integrity()
    manager.free(one.request_id)
    assert manager.usage == 0


def test_a_block_goes_when_the_last_of_its_tokens_leaves_the_window() -> None:
    manager = with_window(6)
    one = request("a", 8)
    fill(manager, one)
    firsts = {}
    for num_computed in range(8, 14):
        one.num_computed_tokens = num_computed
        manager.release_unseen(one)
        firsts[num_computed] = manager.sliding_block_table(one.request_id)[0]
        manager.allocate(one, 1)
    # Token 9 sees 4 … 9, token 13 sees 8 … 13.
    assert firsts == {8: 0, 9: 1, 10: 1, 11: 1, 12: 1, 13: 2}


def test_a_prompt_that_sees_itself_is_kept_until_it_is_computed() -> None:
    manager = with_window(6)
    one = request("a", 22, mask=Mask.PROMPT)
    manager.admit(one, NO_HIT)
    manager.allocate(one, 22)
    one.num_computed_tokens = 21
    manager.release_unseen(one)
    assert manager.sliding_block_table(one.request_id)[0] == 0
    one.num_computed_tokens = 22
    manager.release_unseen(one)
    # The first token that is generated sees 17 … 22.
    assert manager.sliding_block_table(one.request_id)[0] == 4


def test_a_hit_takes_of_the_sliding_group_what_the_next_token_sees() -> None:
    manager = with_window(6)
    fill(manager, request("a", 40, text="same"))
    late = request("b", 41, text="same")
    hit = manager.find_prefix(late)
    # Token 40 sees 35 … 40.
    assert (hit.num_tokens, len(hit.block_ids), len(hit.sliding_block_ids)) == (40, 10, 2)
    fill(manager, late)
    first, blocks = manager.sliding_block_table(late.request_id)
    assert (first, blocks[:2]) == (8, hit.sliding_block_ids)
    # Of a prompt that is cached to its end the last token, 39, is computed again and sees 34 … 39.
    again = manager.find_prefix(request("c", 40, text="same"))
    assert (again.num_tokens, len(again.block_ids), len(again.sliding_block_ids)) == (39, 10, 2)


def test_a_hit_ends_where_all_layers_can_go_on() -> None:
    def hit_without(*indexes: range, window: int = 6) -> tuple[int, int, int]:
        manager = with_window(window)
        early = request("a", 40, text="same")
        fill(manager, early)
        for each in indexes:
            let_go_of_names(manager, early, each)
        hit = manager.find_prefix(request("b", 41, text="same"))
        return hit.num_tokens, len(hit.block_ids), len(hit.sliding_block_ids)

    assert hit_without(range(8)) == (40, 10, 2), "old blocks may be absent"
    assert hit_without(range(9, 10)) == (36, 9, 2)
    assert hit_without(range(8, 9)) == (32, 8, 2)
    assert hit_without(range(3, 10)) == (12, 3, 2)
    assert hit_without(range(1, 10)) == (4, 1, 1), "the first block sees nothing before itself"
    assert hit_without(range(1), range(2, 3), range(4, 5), range(6, 7), range(8, 9)) == (0, 0, 0), "every second"
    assert hit_without(range(10)) == (0, 0, 0)
    assert hit_without(range(1), window=100) == (0, 0, 0), "everything is inside the window"
    assert hit_without(range(10), window=1) == (40, 10, 0), "a token that sees itself only"


def test_a_hit_inside_a_prompt_that_sees_itself_needs_all_its_blocks() -> None:
    def hit_without(indexes: range, num_output_tokens: int) -> int:
        manager = with_window(6)
        early = request("a", 20, text="same", mask=Mask.PROMPT)
        early.token_ids += range(8)
        fill(manager, early)
        let_go_of_names(manager, early, indexes)
        late = request("b", 20, text="same", mask=Mask.PROMPT)
        late.token_ids += range(num_output_tokens)
        return manager.find_prefix(late).num_tokens

    assert hit_without(range(0), 0) == 19
    assert hit_without(range(1), 0) == 0
    assert hit_without(range(2, 3), 0) == 8
    assert hit_without(range(3), 1) == 20, "behind the prompt there is only the window"


def test_a_request_adopts_in_both_groups() -> None:
    manager = with_window(6)
    slow, fast = request("slow", 35, text="same"), request("fast", 34, text="same")
    manager.admit(slow, NO_HIT)
    manager.allocate(slow, 6)
    manager.take_sliding_changes(slow.request_id)
    slow.num_computed_tokens = 6
    fill(manager, fast)
    hit = manager.find_more(slow)
    # From the block of token 6 on; token 32 sees 27 … 32.
    assert (hit.num_tokens, len(hit.block_ids), len(hit.sliding_block_ids)) == (32, 7, 2)
    manager.adopt(slow, hit)
    slow.num_computed_tokens = hit.num_tokens
    assert manager.sliding_block_table(slow.request_id) == (6, hit.sliding_block_ids)
    changes = manager.take_sliding_changes(slow.request_id)
    assert changes is not None
    assert (changes.first, changes.start, changes.block_ids) == (6, 6, hit.sliding_block_ids)
    manager.check_integrity()


def test_own_blocks_before_adopted_ones_stay_while_they_are_seen() -> None:
    manager = with_window(6)
    slow, fast = request("slow", 14, text="same"), request("fast", 9, text="same")
    manager.admit(slow, NO_HIT)
    manager.allocate(slow, 6)
    slow.num_computed_tokens = 6
    own = manager.sliding_block_table(slow.request_id)[1]
    fill(manager, fast)
    hit = manager.find_more(slow)
    manager.adopt(slow, hit)
    # Token 8 sees 3 … 8: block 0 is its own, block 1 the other's.
    assert manager.sliding_block_table(slow.request_id) == (0, (own[0], *hit.sliding_block_ids))
    manager.check_integrity()


def test_admission_asks_both_groups() -> None:
    manager = with_window(6, num_sliding_blocks=6, most=4)
    assert manager.can_admit(request("long", 100), NO_HIT), "it never holds more than four"
    one = request("a", 12)
    manager.admit(one, NO_HIT)
    manager.allocate(one, 12)
    assert not manager.can_admit(request("b", 100), NO_HIT)
    assert manager.can_admit(request("c", 12), NO_HIT)
    assert not manager.can_allocate(one, 16)
    one.num_computed_tokens = 12
    manager.release_unseen(one)
    assert manager.can_admit(request("b", 100), NO_HIT)


def test_who_adopted_of_a_failed_step_in_one_group_only_is_known() -> None:
    """What layers that see everything need was there before; what layers with a window need came with the step."""
    manager = with_window(6)
    early, slow, fast = (request(name, 17, text="same") for name in ("early", "slow", "fast"))
    fill(manager, early)
    let_go_of_names(manager, early, range(4))
    for one in (slow, fast):
        assert manager.find_prefix(one) == NO_HIT
        manager.admit(one, NO_HIT)
    manager.allocate(slow, 2)
    slow.num_computed_tokens = 2
    manager.begin_step()
    manager.allocate(fast, 16)
    manager.publish(fast, 16)
    manager.adopt(slow, manager.find_more(slow))
    assert set(manager.block_table(slow.request_id)) <= set(manager.block_table(early.request_id))
    assert manager.holds_any_of_step(slow.request_id)
    manager.withdraw_step()
    assert not manager.holds_any_of_step(slow.request_id)
    assert manager.find_prefix(request("late", 17, text="same")) == NO_HIT
    manager.check_integrity()
