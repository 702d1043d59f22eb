from __future__ import annotations

import pytest

from decoder_svc.scheduling.kv_cache.block_pool import BlockPool
from decoder_svc.scheduling.request import BlockHash

ONE, TWO = BlockHash(b"one"), BlockHash(b"two")


def test_blocks_have_one_holder_until_somebody_joins() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert not set(first) & set(second)
    assert pool.num_free_blocks == 1
    pool.hold(first)
    pool.release(first)
    assert pool.num_free_blocks == 1
    pool.check_integrity([first, second])


def test_a_sequences_tail_is_reused_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.publish(block, BlockHash(bytes([index])))
    pool.release(blocks)
    assert pool.allocate(3) == blocks[::-1]


def test_blocks_without_a_name_go_first() -> None:
    pool = BlockPool(3)
    named, unnamed, _ = pool.allocate(3)
    pool.publish(named, ONE)
    pool.release([named])
    pool.release([unnamed])
    assert pool.allocate(1) == [unnamed]
    assert pool.allocate(1) == [named]


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)


def test_a_free_block_is_found_until_it_is_handed_out() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, ONE)
    pool.release([block])
    assert pool.find(ONE) == block
    assert pool.is_free(block)
    pool.allocate(1)
    assert pool.find(ONE) is None


def test_a_found_block_is_no_longer_free() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, ONE)
    pool.release([block])
    pool.hold([block])
    assert pool.num_free_blocks == 1
    assert pool.allocate(1) != [block]
    pool.check_integrity([[block], [1 - block]])


def test_evicting_one_of_two_blocks_with_equal_hash_keeps_the_other_findable() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, ONE)
    pool.publish(second, ONE)
    assert pool.num_published_blocks == 2
    pool.release([first])
    assert pool.allocate(1) == [first]
    assert pool.find(ONE) == second
    pool.check_integrity([[first], [second]])


def test_reset_forgets_names_and_keeps_holders() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, ONE)
    pool.publish(second, TWO)
    pool.release([second])
    version = pool.version
    pool.reset()
    assert pool.version > version
    assert pool.find(ONE) is None
    assert pool.find(TWO) is None
    assert pool.num_free_blocks == 1
    pool.check_integrity([[first]])
