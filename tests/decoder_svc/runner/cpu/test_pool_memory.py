"""Zeros of a KV pool on the host: aligned to pages, writable, and without memory until they are written."""

from __future__ import annotations

import mmap

import psutil
import pytest
import torch

from decoder_svc.runner.cpu.pool_memory import pool_zeros

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pool_is_zeros_that_begin_on_a_page_and_can_be_written(dtype: torch.dtype) -> None:
    pool = pool_zeros((3, 5, 2, 4), dtype)
    assert (pool.shape, pool.dtype) == ((3, 5, 2, 4), dtype)
    assert not pool.any()
    assert pool.data_ptr() % mmap.PAGESIZE == 0
    pool[1] = 2
    assert pool.sum() == 2 * 5 * 2 * 4


def test_a_large_pool_takes_no_memory_before_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pool = pool_zeros((256, MIB // 4), torch.float32)
    assert process.memory_info().rss - before < 64 * MIB
    pool[:128] = 1
    assert process.memory_info().rss - before > 96 * MIB


def test_pools_do_not_share_memory() -> None:
    one, other = (pool_zeros((2, 4), torch.float32) for _ in range(2))
    one.fill_(1)
    assert not other.any()


def test_an_empty_pool_is_allowed() -> None:
    assert pool_zeros((0, 4), torch.float32).numel() == 0


def test_a_pool_larger_than_the_address_space_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError)):
        pool_zeros((1 << 60,), torch.float32)
