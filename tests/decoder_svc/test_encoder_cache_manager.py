from __future__ import annotations

import pytest

from decoder_svc.encoder_cache_manager import EncoderCacheManager
from decoder_svc.request import RequestId, RowSource
from tests.decoder_svc.scheduling import key

A, B = RequestId("a"), RequestId("b")


@pytest.fixture
def cache() -> EncoderCacheManager:
    """Ten rows, four of them resident for picture x and held by request a."""
    cache = EncoderCacheManager(10)
    cache.reserve(key("x"), 4, for_running=True)
    cache.use(key("x"), A, running=True)
    assert cache.arrived(key("x"), RowSource.ENCODED)
    return cache


def test_rows_are_resident_only_after_they_arrived(cache: EncoderCacheManager) -> None:
    cache.reserve(key("y"), 6, for_running=True)
    assert cache.is_known(key("y"))
    assert not cache.is_resident(key("y"))
    assert cache.source(key("y")) is None
    assert cache.num_reserved_rows == 10


def test_asking_evicts_nothing_and_held_rows_stay(cache: EncoderCacheManager) -> None:
    assert not cache.can_reserve(7, for_running=True)
    cache.release(key("x"), A)
    assert cache.can_reserve(7, for_running=True)
    assert cache.is_resident(key("x"))


def test_oldest_release_goes_first(cache: EncoderCacheManager) -> None:
    cache.reserve(key("y"), 4, for_running=True)
    cache.arrived(key("y"), RowSource.SHARED_CACHE)
    cache.use(key("y"), B, running=True)
    cache.release(key("y"), B)
    cache.release(key("x"), A)
    cache.reserve(key("z"), 4, for_running=False)
    assert cache.take_evicted() == (key("y"),)
    assert cache.is_resident(key("x"))


def test_wanted_rows_give_way_to_running_requests_only(cache: EncoderCacheManager) -> None:
    cache.release(key("x"), A)
    cache.use(key("x"), B, running=False)
    assert not cache.can_reserve(8, for_running=False)
    assert cache.can_reserve(8, for_running=True)


def test_rows_on_their_way_are_not_given_away() -> None:
    cache = EncoderCacheManager(4)
    cache.reserve(key("x"), 4, for_running=True)
    assert not cache.can_reserve(1, for_running=True)


def test_an_answer_for_a_dropped_key_is_refused(cache: EncoderCacheManager) -> None:
    cache.reserve(key("y"), 2, for_running=True)
    cache.drop(key("y"))
    assert not cache.arrived(key("y"), RowSource.ENCODED)
    assert cache.num_reserved_rows == 4
    cache.check_integrity()
