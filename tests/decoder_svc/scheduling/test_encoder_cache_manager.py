from __future__ import annotations

import pytest

from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager, RowUser
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.row_range import RowRange
from tests.decoder_svc.scheduling.simulation import key, rows


def user(name: str, *, is_waiting: bool = False, arrival_s: float = 0.0, index: int = 0) -> RowUser:
    return RowUser(is_waiting, 0, 0, arrival_s, RequestId(name), index)


A, B = user("a", arrival_s=1), user("b", arrival_s=2)


@pytest.fixture
def cache() -> EncoderCacheManager:
    """Ten rows, four of them resident for picture x and needed by request a."""
    cache = EncoderCacheManager(10)
    bring(cache, "x", rows(0, 4))
    cache.need(key("x"), A, rows(0, 4))
    return cache


def bring(cache: EncoderCacheManager, name: str, which: RowRange) -> None:
    cache.reserve(key(name), which)
    assert cache.arrived(key(name), which)


def release(cache: EncoderCacheManager, name: str, who: RowUser) -> None:
    cache.release(key(name), who.request_id, who.image_index)
    cache.check_integrity()


def test_rows_are_resident_only_after_they_arrived(cache: EncoderCacheManager) -> None:
    cache.reserve(key("y"), rows(0, 6))
    assert cache.first_missing_row(key("y"), rows(0, 6)) == 0
    assert cache.num_reserved_rows == 10


def test_rows_already_asked_for_are_not_asked_for_again(cache: EncoderCacheManager) -> None:
    cache.reserve(key("x"), rows(6, 8))
    assert cache.unasked(key("x"), rows(2, 10)) == [rows(4, 6), rows(8, 10)]
    assert cache.first_missing_row(key("x"), rows(2, 10)) == 4
    assert cache.first_missing_row(key("x"), rows(1, 4)) is None
    assert cache.unasked(key("y"), rows(3, 5)) == [rows(3, 5)]


def test_asking_evicts_nothing_and_needed_rows_stay(cache: EncoderCacheManager) -> None:
    assert not cache.can_reserve(7)
    release(cache, "x", A)
    assert cache.can_reserve(7)
    assert cache.first_missing_row(key("x"), rows(0, 4)) is None


def test_rows_that_are_passed_may_go_while_the_rest_is_needed(cache: EncoderCacheManager) -> None:
    cache.need(key("x"), A, rows(3, 4))
    assert cache.can_reserve(9)
    cache.reserve(key("y"), rows(0, 8))
    assert cache.take_evicted() == ((key("x"), rows(1, 3)),)
    assert cache.first_missing_row(key("x"), rows(3, 4)) is None


def test_no_more_is_evicted_than_must_be(cache: EncoderCacheManager) -> None:
    release(cache, "x", A)
    cache.reserve(key("y"), rows(0, 7))
    assert cache.take_evicted() == ((key("x"), rows(3, 4)),)
    cache.check_integrity()


def test_oldest_release_goes_first(cache: EncoderCacheManager) -> None:
    bring(cache, "y", rows(0, 4))
    cache.need(key("y"), B, rows(0, 4))
    release(cache, "y", B)
    release(cache, "x", A)
    cache.reserve(key("z"), rows(0, 6))
    assert cache.take_evicted() == ((key("y"), rows(0, 4)),)


def test_a_hit_takes_an_image_out_of_the_release_order(cache: EncoderCacheManager) -> None:
    bring(cache, "y", rows(0, 4))
    cache.need(key("y"), B, rows(0, 4))
    release(cache, "x", A)
    release(cache, "y", B)
    cache.need(key("x"), B, rows(0, 4))
    release(cache, "x", B)
    cache.reserve(key("z"), rows(0, 6))
    assert cache.take_evicted() == ((key("y"), rows(0, 4)),)


def test_a_request_that_never_needed_an_image_does_not_make_it_younger(cache: EncoderCacheManager) -> None:
    bring(cache, "y", rows(0, 4))
    release(cache, "x", A)
    cache.need(key("y"), B, rows(0, 4))
    release(cache, "y", B)
    release(cache, "x", B)
    cache.reserve(key("z"), rows(0, 6))
    assert cache.take_evicted() == ((key("x"), rows(0, 4)),)


def test_two_showings_of_an_image_in_one_request_need_it_apart(cache: EncoderCacheManager) -> None:
    cache.need(key("x"), user("a", index=1), rows(0, 2))
    release(cache, "x", A)
    assert cache.can_reserve(8)
    assert not cache.can_reserve(9)


def test_only_users_behind_can_be_displaced(cache: EncoderCacheManager) -> None:
    waiting = user("w", is_waiting=True)
    bring(cache, "y", rows(0, 6))
    cache.need(key("y"), waiting, rows(0, 6))
    assert not cache.can_reserve(1)
    assert cache.can_reserve(6, B)
    assert not cache.can_reserve(7, B)
    assert cache.can_reserve(10, user("first", arrival_s=0))
    cache.reserve(key("z"), rows(0, 2), B)
    assert cache.take_evicted() == ((key("y"), rows(4, 6)),)


def test_unneeded_rows_are_evicted_before_those_of_requests_behind(cache: EncoderCacheManager) -> None:
    bring(cache, "y", rows(0, 6))
    cache.need(key("y"), B, rows(0, 6))
    cache.need(key("x"), A, rows(2, 4))
    cache.reserve(key("z"), rows(0, 3), A)
    assert cache.take_evicted() == ((key("x"), rows(0, 2)), (key("y"), rows(5, 6)))


def test_rows_on_their_way_are_not_given_away() -> None:
    cache = EncoderCacheManager(4)
    cache.reserve(key("x"), rows(0, 4))
    assert not cache.can_reserve(1, A)


def test_an_answer_for_dropped_rows_is_refused_and_the_rest_stays(cache: EncoderCacheManager) -> None:
    cache.reserve(key("x"), rows(4, 6))
    cache.drop(key("x"), rows(4, 6))
    assert not cache.arrived(key("x"), rows(4, 6))
    cache.reserve(key("y"), rows(0, 2))
    cache.drop(key("y"), rows(0, 2))
    assert cache.num_uses() == 1
    assert cache.num_reserved_rows == 4
    cache.check_integrity()
