"""Layers with a window beside layers that see everything: what is let go, what is still found, who must be asked."""

from __future__ import annotations

from decoder_svc.scheduling.kv_cache.kv_cache_manager import NO_HIT, KVCacheManager
from decoder_svc.scheduling.kv_cache.kv_group import SlidingGroupSize
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.window import Window
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import fill, request


def with_window(
    window: int | Window, num_blocks: int = 32, num_sliding_blocks: int = 32, most: int = 12
) -> KVCacheManager:
    """Blocks of four tokens for layers that see everything, and for layers with a window."""
    found = window if isinstance(window, Window) else Window(window)
    return KVCacheManager(num_blocks, 4, sliding=SlidingGroupSize(found, num_sliding_blocks, most))


def let_go_of_names(manager: KVCacheManager, one: Request, indexes: range) -> None:
    """The room of these blocks of the sliding group is needed for something else."""
    assert manager.sliding_pool is not None
    found = [manager.sliding_pool.find(one.block_hashes[index]) for index in indexes]
    manager.sliding_pool.withdraw([block for block in found if block is not None])


def test_blocks_outside_the_window_are_freed_and_still_found() -> None:
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
    assert manager.sliding_pool.num_published_blocks == 5
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


def test_blocks_of_a_chunk_of_the_sequence_go_when_the_chunk_ends() -> None:
    manager = with_window(Window(10, is_chunked=True))
    one = request("a", 8)
    fill(manager, one)
    firsts = {}
    for num_computed in range(8, 22):
        one.num_computed_tokens = num_computed
        manager.release_unseen(one)
        firsts[num_computed] = manager.sliding_block_table(one.request_id)[0]
        manager.allocate(one, 1)
    # Token 10 is the first of its chunk, in the middle of block 2, and token 20 the first of block 5.
    assert firsts == {**dict.fromkeys((8, 9), 0), **dict.fromkeys(range(10, 20), 2), **dict.fromkeys((20, 21), 5)}


def test_a_prefix_that_ends_with_a_chunk_needs_no_block_of_it() -> None:
    manager = with_window(Window(8, is_chunked=True))
    one = request("a", 24, text="same")
    manager.admit(one, NO_HIT)
    manager.allocate(one, 24)
    manager.publish(one, 24)
    let_go_of_names(manager, one, range(4))
    # Token 17 is in a chunk whose blocks are there. Token 13 is not, but the one that begins with token 16 needs none.
    assert manager.find_prefix(request("b", 21, text="same")).num_tokens == 20
    assert manager.find_prefix(request("c", 17, text="same")).num_tokens == 16
    assert manager.find_prefix(request("d", 16, text="same")).num_tokens == 8
    assert manager.find_prefix(request("e", 9, text="same")).sliding_block_ids == ()


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


def test_a_hit_takes_the_blocks_of_the_sliding_group_that_the_next_token_sees() -> None:
    manager = with_window(6)
    fill(manager, request("a", 40, text="same"))
    late = request("b", 41, text="same")
    hit = manager.find_prefix(late)
    # Token 40 sees 35 … 40.
    assert (hit.num_tokens, len(hit.block_ids), len(hit.sliding_block_ids)) == (40, 10, 2)
    manager.admit(late, hit)
    assert manager.sliding_block_table(late.request_id) == (8, hit.sliding_block_ids)
    # The prompt is fully cached: its last token, 39, is computed again and attends to 34 … 39.
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
    assert manager.can_allocate(one, 24)
    assert not manager.can_allocate(one, 25)
    one.num_computed_tokens = 12
    manager.release_unseen(one)
    assert manager.can_admit(request("b", 100), NO_HIT)


def test_a_request_that_adopted_of_a_failed_step_in_one_group_only_is_found() -> None:
    """The full-attention blocks were cached before the step; only the sliding-window blocks came with it."""
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
    assert manager.holds_any_of_steps(slow.request_id)
    manager.withdraw_steps()
    assert not manager.holds_any_of_steps(slow.request_id)
    assert manager.find_prefix(request("late", 17, text="same")) == NO_HIT
    manager.check_integrity()
