"""The metadata of many images come in one round trip, and each is checked as if it were read alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.circuit_breaker import CircuitBreaker
from tests.lookonce.store.damage import flip
from tests.lookonce.store.entries import LARGE, SMALL, fresh_key, make_rows, metadata_key, write
from tests.lookonce.store.redis.resp_server import Lie, RespServer, always, changed, instead, swapped
from tests.lookonce.store.replies import ERRORS, NASTY

MakeStore = Callable[..., EmbeddingStore]

KEYS = [fresh_key() for _ in range(6)]
# Shapes under these keys, so that a reply for another key is noticed; the third image is unknown.
SHAPES = [SMALL, LARGE, None, SMALL, LARGE, SMALL]


@pytest.fixture
def filled(shared_redis: EmbeddedRedis, make_store: MakeStore, shared_admin: Any) -> EmbeddingStore:
    """A store that has the images of KEYS, and has looked up nothing yet."""
    store = make_store(shared_redis.url)
    for key, meta in zip(KEYS, SHAPES, strict=True):
        shared_admin.delete(metadata_key(key))
        if meta is not None:
            write(store, key, meta, memoryview(make_rows(meta)), overwrite=True)
    return store


@pytest.fixture
def server(shared_redis: EmbeddedRedis) -> Iterator[RespServer]:
    server = RespServer(shared_redis.url)
    yield server
    server.close()


def counts(store: EmbeddingStore) -> dict[str, int]:
    """Returns the outcomes of look-ups."""
    return {outcome: number for (label, outcome), number in store.stats.snapshot().items() if label == "metadata"}


def test_the_answers_have_the_order_of_the_keys(filled: EmbeddingStore) -> None:
    assert filled.metadata_of(KEYS) == SHAPES
    assert filled.metadata_of(KEYS[::-1]) == SHAPES[::-1]
    assert filled.metadata_of([KEYS[1]]) == [LARGE]
    assert filled.metadata_of([KEYS[0], KEYS[0]]) == [SMALL, SMALL]
    assert filled.metadata_of([]) == []
    assert counts(filled) == {"ok": 13, "absent": 2}


@pytest.mark.usefixtures("filled")
def test_all_commands_are_sent_before_the_first_reply(server: RespServer, make_store: MakeStore) -> None:
    store = make_store(server.url, budget_s=1.0)
    # The first reply never comes.
    server.lie(Lie(0, instead(b""), linger_s=0.2))
    store.metadata_of(KEYS)
    assert server.commands[: len(KEYS)] == [b"GETRANGE"] * len(KEYS)
    assert sum(counts(store).values()) == len(KEYS)


@pytest.mark.parametrize("damage", ["short", "long", "flipped", "other", "list"])
def test_a_damaged_record_is_deleted_and_costs_no_other(filled: EmbeddingStore, shared_admin: Any, damage: str) -> None:
    name = metadata_key(KEYS[1])
    record = shared_admin.get(name)
    if damage == "list":
        shared_admin.delete(name)
        shared_admin.rpush(name, "a")
    else:
        values = {
            "short": record[:-1],
            "long": record + b"\0" * 100,
            "flipped": flip([(50, 0)])(record),
            "other": shared_admin.get(metadata_key(KEYS[4])),
        }
        shared_admin.set(name, values[damage])
    assert filled.metadata_of(KEYS) == [SMALL, None, None, SMALL, LARGE, SMALL]
    assert not shared_admin.exists(name)
    assert sum(counts(filled).values()) == len(KEYS)
    assert counts(filled)["ok"] == 4


@pytest.mark.usefixtures("filled")
def test_no_reply_gives_a_wrong_shape(server: RespServer, make_store: MakeStore, shared_admin: Any) -> None:
    store = make_store(server.url, budget_s=2.0, breaker=CircuitBreaker(failure_threshold=1_000_000))
    records = {key: shared_admin.get(metadata_key(key)) for key in KEYS}
    lies = [instead(reply) for reply in NASTY[::3]]
    lies += [instead(b"-" + text + b"\r\n") for text in ERRORS]
    lies += [always(b"-" + text + b"\r\n") for text in ERRORS]
    lies += [changed(flip([(at, at % 8)])) for at in range(0, 90, 7)]
    for at in (0, 1, len(KEYS) - 1):
        for tell in [*lies, swapped()]:
            for key, record in records.items():
                if record is not None:
                    shared_admin.set(metadata_key(key), record)
            before = Counter(counts(store))
            server.lie(Lie(at, tell, linger_s=0.01))
            found = store.metadata_of(KEYS)
            assert all(one in (None, right) for one, right in zip(found, SHAPES, strict=True))
            assert sum((Counter(counts(store)) - before).values()) == len(KEYS)
    server.lie(None)
    for key, record in records.items():
        if record is not None:
            shared_admin.set(metadata_key(key), record)
    assert store.metadata_of(KEYS) == SHAPES


@pytest.mark.usefixtures("filled")
def test_an_error_about_one_key_costs_no_other(server: RespServer, make_store: MakeStore) -> None:
    store = make_store(server.url)
    server.lie(Lie(1, instead(b"-NOPERM no\r\n")))
    # The key is asked for again, alone.
    assert store.metadata_of(KEYS) == SHAPES
    assert counts(store) == {"ok": 5, "absent": 1}


def test_a_server_that_is_gone_is_asked_once_and_counts_for_each_key(make_store: MakeStore) -> None:
    with EmbeddedRedis(64 << 20) as redis:
        url = redis.url
    store = make_store(url, breaker=CircuitBreaker(failure_threshold=2))
    assert store.metadata_of(KEYS) == [None] * len(KEYS)
    assert counts(store) == {"connect_failed": len(KEYS)}
    for _ in range(2):
        assert store.metadata_of(KEYS) == [None] * len(KEYS)
    assert counts(store) == {"connect_failed": 2 * len(KEYS), "breaker_open": len(KEYS)}


def test_a_closed_store_knows_nothing(filled: EmbeddingStore) -> None:
    filled.close()
    assert filled.metadata_of(KEYS) == [None] * len(KEYS)
    assert counts(filled) == {"store_closed": len(KEYS)}
