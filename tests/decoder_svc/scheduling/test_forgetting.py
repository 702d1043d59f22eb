"""Images that are to be forgotten: nothing of them is found afterwards, and whoever uses them meanwhile ends well."""

from __future__ import annotations

import pytest

from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import FinishReason
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SampledToken
from lookonce.forgotten import EVERYTHING, Forgotten, new_token, parse_message, to_message
from tests.decoder_svc.scheduling.simulation import image, key, request, rows, scheduler
from tests.decoder_svc.scheduling.test_encoder_cache_manager import user


def run_to_its_end(target: Scheduler, name: str) -> None:
    """Steps, with rows that arrive at once, until the request is gone."""
    for _ in range(50):
        output = target.schedule()
        sampled = [chunk for chunk in output.chunks if chunk.samples]
        target.update(output, [_token(chunk.request_id) for chunk in sampled])
        for fetch in output.fetches:
            target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows)
        if name not in {one.request_id for one in target.live_requests()}:
            return
    raise AssertionError(f"{name} did not end")


def _token(request_id: RequestId) -> SampledToken:
    return SampledToken(request_id, 7, None)


@pytest.mark.parametrize("forgotten", [Forgotten.of([key("cat")]), EVERYTHING])
def test_a_forgotten_image_is_neither_a_prefix_hit_nor_on_the_device(forgotten: Forgotten) -> None:
    target = scheduler(num_blocks=40)
    for name in ("first", "again"):
        target.add(request(name, 13, (image("cat", 1, 8),), text="same"))
        run_to_its_end(target, name)
    assert target.kv_cache.stats.num_hit_tokens == 12
    target.forget(forgotten)
    assert target.encoder_cache.num_reserved_rows == 0
    assert target.schedule().evicted_rows == ((key("cat"), rows(0, 8)),)
    target.add(request("later", 13, (image("cat", 1, 8),), text="same"))
    run_to_its_end(target, "later")
    assert target.kv_cache.stats.num_hit_tokens == 12
    target.check_integrity()


def test_rows_of_other_images_stay() -> None:
    target = scheduler(num_blocks=40)
    target.add(request("both", 21, (image("cat", 1, 8), image("dog", 10, 8))))
    run_to_its_end(target, "both")
    target.forget(Forgotten.of([key("cat")]))
    assert target.encoder_cache.unasked(key("dog"), rows(0, 8)) == []
    assert target.encoder_cache.unasked(key("cat"), rows(0, 8)) == [rows(0, 8)]


def test_a_request_that_is_using_the_image_ends_and_leaves_nothing_behind() -> None:
    target = scheduler(num_blocks=40, token_budget=6)
    shown = request("shown", 21, (image("cat", 1, 8),), text="same")
    target.add(shown)
    output = target.schedule()
    target.update(output, [])
    for fetch in output.fetches:
        target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows)
    target.forget(Forgotten.of([key("cat")]))
    run_to_its_end(target, "shown")
    assert shown.finish_reason is FinishReason.LENGTH
    assert target.encoder_cache.num_reserved_rows == 0
    target.add(request("later", 21, (image("cat", 1, 8),), text="same"))
    run_to_its_end(target, "later")
    assert target.kv_cache.stats.num_hit_tokens == 0
    target.check_integrity()


def test_rows_on_their_way_are_dropped_when_they_arrive_unless_somebody_waits_for_them() -> None:
    cache = EncoderCacheManager(16)
    for name in ("cat", "dog"):
        cache.need(key(name), user(name), rows(0, 4))
        cache.reserve(key(name), rows(0, 4))
    cache.release(key("cat"), RequestId("cat"), 0)
    cache.forget(EVERYTHING)
    assert not cache.arrived(key("cat"), rows(0, 4))
    assert cache.arrived(key("dog"), rows(0, 4))
    assert cache.num_reserved_rows == 4
    cache.release(key("dog"), RequestId("dog"), 0)
    assert cache.num_reserved_rows == 0
    cache.check_integrity()


def test_a_request_that_overlaps_with_a_user_of_a_forgotten_image_shares_nothing() -> None:
    target = scheduler(num_blocks=60, token_budget=6, max_num_seqs=8)
    target.add(request("before", 21, (image("cat", 1, 8),), text="same"))
    output = target.schedule()
    target.update(output, [])
    for fetch in output.fetches:
        target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows)
    target.forget(Forgotten.of([key("cat")]))
    target.add(request("overlapping", 21, (image("cat", 1, 8),), text="same"))
    run_to_its_end(target, "overlapping")
    assert target.encoder_cache.num_reserved_rows == 0
    target.add(request("later", 21, (image("cat", 1, 8),), text="same"))
    run_to_its_end(target, "later")
    assert target.kv_cache.stats.num_hit_tokens == 0
    target.check_integrity()


def test_a_message_names_keys_or_everything() -> None:
    token = new_token()
    some = Forgotten.of([key("cat"), key("dog")])
    assert parse_message(to_message(token, some)) == (token, some)
    assert some.includes(key("cat").value)
    assert not some.includes(key("bird").value)
    assert parse_message(to_message(token, EVERYTHING)) == (token, EVERYTHING)
    for garbage in (b"", b"x", b"x" * 33, b"x" * 70, token + bytes(32 * 257)):
        assert parse_message(garbage)[1] == EVERYTHING, "what cannot be read means everything"


def test_two_messages_together_forget_the_union() -> None:
    cat, dog = Forgotten.of([key("cat")]), Forgotten.of([key("dog")])
    assert cat.and_also(dog) == Forgotten.of([key("cat"), key("dog")])
    assert cat.and_also(EVERYTHING) == EVERYTHING.and_also(cat) == EVERYTHING
