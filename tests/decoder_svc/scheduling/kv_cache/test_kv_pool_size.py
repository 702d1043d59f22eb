"""The size of the KV pool: the configured one if there is any, else a share of the free memory."""

from __future__ import annotations

import logging

import pytest

from decoder_svc.scheduling.kv_cache.kv_pool_size import BlockBytes, KVPoolConfig, num_kv_blocks, sliding_group_size
from decoder_svc.scheduling.window import Window
from lookonce.errors import ConfigurationError


def blocks(
    num_blocks: int | None = None, memory_bytes: int | None = None, share: float = 0.5, free: int = 10_000
) -> int:
    wish = KVPoolConfig(num_blocks, memory_bytes, share)
    return num_kv_blocks(wish, BlockBytes(100), free_bytes=free, max_useful_blocks=40)


def test_the_pool_is_a_share_of_the_free_memory() -> None:
    assert blocks(free=6000) == 30
    assert blocks(free=6000, share=0.25) == 15


def test_no_more_than_all_running_requests_at_their_longest_can_fill() -> None:
    assert blocks(free=1_000_000) == 40


def test_bytes_that_were_asked_for_are_taken_and_may_be_more_than_useful() -> None:
    assert blocks(memory_bytes=9_050) == 90


def test_a_number_of_blocks_wins_over_bytes() -> None:
    assert blocks(num_blocks=7, memory_bytes=9_000) == 7


def test_more_than_the_free_memory_is_granted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert blocks(num_blocks=101) == 101
    assert "10100 bytes" in caplog.text
    assert "10000 are free" in caplog.text


def test_a_size_that_fits_is_granted_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert blocks(num_blocks=100) == 100
    assert not caplog.records


@pytest.mark.parametrize("wish", [{"memory_bytes": 199}, {"free": 399}, {"free": 0}])
def test_a_pool_without_room_for_two_blocks_is_refused(wish: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="one block takes 100"):
        blocks(**wish)


def test_a_sliding_group_has_a_window_and_a_step_for_each_request_and_no_more_than_the_full_group() -> None:
    def size(num_blocks: int) -> tuple[int, int]:
        found = sliding_group_size(
            Window(1024), block_size=16, num_blocks=num_blocks, max_num_seqs=8, max_num_batched_tokens=2048
        )
        return found.num_blocks, found.max_blocks_per_request

    # 1023 + 2048 tokens are 192 blocks, and one more where they begin inside a block.
    assert size(10_000) == (8 * 193, 193)
    assert size(100) == (100, 193)


@pytest.mark.parametrize(("num_bytes", "num_blocks"), [(599, 0), (6000, 10), (6599, 15), (6600, 16), (6699, 16)])
def test_both_groups_are_paid_from_the_same_bytes(num_bytes: int, num_blocks: int) -> None:
    costs = BlockBytes(100, 500, 10)
    assert costs.num_blocks_in(num_bytes) == num_blocks
    assert costs.pool_bytes(num_blocks) <= num_bytes < costs.pool_bytes(num_blocks + 1)


def test_layers_with_a_window_leave_room_for_more_blocks() -> None:
    """Gemma 3: five of six layers see 1024 tokens. The memory of 8 requests of 8192 tokens holds 4.1 times as many."""
    one_group, two_groups = BlockBytes(6), BlockBytes(1, 5, 8 * 193)
    free = one_group.pool_bytes(8 * 8192 // 16)
    assert two_groups.num_blocks_in(free) / one_group.num_blocks_in(free) == pytest.approx(4.1, abs=0.1)
