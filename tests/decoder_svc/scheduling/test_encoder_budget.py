from __future__ import annotations

import logging

import pytest

from decoder_svc.scheduling.encoder_budget import EncoderBudget, encoder_budget


def budget(
    batched: int, rows: int, *, seqs: int = 64, images: int = 16, block: int = 16, cache: int | None = None
) -> EncoderBudget:
    return encoder_budget(
        max_num_batched_tokens=batched,
        max_rows_per_image=rows,
        max_num_seqs=seqs,
        max_images_per_prompt=images,
        block_size=block,
        configured_cache_rows=cache,
    )


def test_the_batch_decides_where_images_are_small() -> None:
    assert budget(2048, 576) == EncoderBudget(compute_rows=2048, cache_rows=2048 + 16, num_profiled_images=4)


def test_an_image_larger_than_the_batch_raises_both(caplog: pytest.LogCaptureFixture) -> None:
    """The case of vLLM PR #11895: 8192 batched tokens, an image of 8687."""
    with caplog.at_level(logging.WARNING):
        assert budget(8192, 8687) == EncoderBudget(compute_rows=8687, cache_rows=8687 + 16, num_profiled_images=1)
    assert "8687" in caplog.text
    assert "max_num_batched_tokens (8192)" in caplog.text


def test_a_configured_cache_is_taken_unless_an_image_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert budget(2048, 576, cache=1000).cache_rows == 1000 + 16
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert budget(2048, 576, cache=100).cache_rows == 576 + 16
    assert "encoder_cache_rows is 100" in caplog.text


def test_an_image_smaller_than_a_block_needs_no_more_than_itself_beside() -> None:
    assert budget(64, 4).cache_rows == 68


def test_few_requests_bound_the_profiled_size() -> None:
    assert budget(2048, 100, seqs=2, images=3).num_profiled_images == 6


def test_a_text_only_server_has_no_budget() -> None:
    assert budget(2048, 576, images=0) == EncoderBudget(0, 0, 0)
