"""Writes that the shared cache refuses leave a line in the log, and no more than one a minute."""

from __future__ import annotations

from collections.abc import Callable

from structlog.testing import capture_logs

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.server.settings import ServiceSettings
from lookonce.server.settings_parser import parse_settings
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.miss_reason import MissReason
from lookonce.store.refusal_log import RefusalLog
from tests.lookonce.store.entries import LARGE, fresh_key, make_rows, write

MakeStore = Callable[..., EmbeddingStore]

LINE = "the shared cache refuses writes; images are encoded again"


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_one_line_a_minute_for_each_reason() -> None:
    clock = Clock()
    refusals = RefusalLog(clock)
    with capture_logs() as lines:
        for reason in (MissReason.NOPERM, MissReason.NOPERM, MissReason.SERVER_ERROR, MissReason.NOPERM):
            refusals.note(reason)
        clock.now_s += 60
        refusals.note(MissReason.NOPERM)
    assert [line["reason"] for line in lines] == ["noperm", "server_error", "noperm"]
    assert {(line["event"], line["log_level"]) for line in lines} == {(LINE, "warning")}


def test_a_full_or_unreachable_server_has_its_own_signs() -> None:
    refusals = RefusalLog()
    with capture_logs() as lines:
        for reason in (MissReason.OOM, MissReason.TIMEOUT, MissReason.BREAKER_OPEN, MissReason.CLOSED):
            refusals.note(reason)
    assert lines == []


def test_a_write_that_redis_refuses_is_logged_once(shared_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    # Redis refuses times to live that end after its calendar.
    store = make_store(shared_redis.url, ttl_s=10**17)
    rows = memoryview(make_rows(LARGE))
    with capture_logs() as lines:
        assert not any(write(store, fresh_key(), LARGE, rows) for _ in range(3))
    assert [(line["event"], line["reason"]) for line in lines] == [(LINE, "server_error")]


def test_the_longest_time_to_live_of_the_settings_is_accepted(
    shared_redis: EmbeddedRedis, make_store: MakeStore
) -> None:
    longest_s = 10 * 365 * 86_400
    store = make_store(shared_redis.url, ttl_s=parsed_ttl_s(longest_s))
    assert write(store, fresh_key(), LARGE, memoryview(make_rows(LARGE)))


def parsed_ttl_s(ttl_s: int) -> int:
    return parse_settings(ServiceSettings, ["--model", ".", "--ttl-s", str(ttl_s)], "test").ttl_s
