from __future__ import annotations

import pytest

from decoder_svc.block_pool import BlockPool
from decoder_svc.kv_cache_manager import KVCacheManager
from tests.decoder_svc.scheduling import request


def test_blocks_have_one_owner_at_a_time() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert not set(first) & set(second)
    assert pool.num_free_blocks == 1
    pool.check_integrity([first, second])


def test_a_sequences_tail_is_reused_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.free(blocks)
    assert pool.allocate(3) == blocks[::-1]


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_questions_about_blocks_change_nothing() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=4)
    one = request("a", 9)
    assert manager.num_blocks_missing(one, 9) == 3
    assert manager.can_allocate(one, 16)
    assert not manager.can_allocate(one, 17)
    assert manager.usage == 0
    assert len(manager.allocate(one, 9)) == 3
    one.num_computed_tokens = 9
    assert manager.num_blocks_missing(one, 3) == 0
    assert len(manager.block_table(one.request_id)) == 3
    manager.free(one.request_id)
    manager.free(one.request_id)
    manager.check_integrity()
    assert manager.usage == 0
