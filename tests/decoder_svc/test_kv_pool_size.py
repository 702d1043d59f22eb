"""How large the KV pool becomes: what was asked for wins, else a share of what is free."""

from __future__ import annotations

import logging

import pytest

from decoder_svc.kv_pool_size import KVPoolWish, num_kv_blocks
from lookonce.errors import ConfigurationError


def blocks(
    num_blocks: int | None = None, memory_bytes: int | None = None, share: float = 0.5, free: int = 10_000
) -> int:
    wish = KVPoolWish(num_blocks, memory_bytes, share)
    return num_kv_blocks(wish, block_bytes=100, free_bytes=free, max_useful_blocks=40)


def test_a_share_of_what_is_free() -> None:
    assert blocks(free=6000) == 30
    assert blocks(free=6000, share=0.25) == 15


def test_no_more_than_all_running_requests_at_their_longest_can_fill() -> None:
    assert blocks(free=1_000_000) == 40


def test_bytes_that_were_asked_for_are_taken_and_may_be_more_than_useful() -> None:
    assert blocks(memory_bytes=9_050) == 90


def test_a_number_of_blocks_wins_over_bytes() -> None:
    assert blocks(num_blocks=7, memory_bytes=9_000) == 7


def test_what_is_not_there_is_granted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert blocks(num_blocks=101) == 101
    assert "10100 bytes" in caplog.text
    assert "10000 are free" in caplog.text


def test_what_fits_is_granted_without_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert blocks(num_blocks=100) == 100
    assert not caplog.records


@pytest.mark.parametrize("wish", [{"memory_bytes": 199}, {"free": 399}, {"free": 0}])
def test_a_pool_without_room_for_two_blocks_is_refused(wish: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="one block takes 100"):
        blocks(**wish)
