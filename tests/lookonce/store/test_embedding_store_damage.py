"""Corrupt values and values that change during a read are misses with a reason, and never wrong rows."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.store.entries import (
    LARGE,
    SMALL,
    data_key,
    fresh_key,
    make_entry,
    make_rows,
    metadata_key,
    read,
    read_all,
    remove,
    write,
)
from tests.lookonce.store.faults import FaultProxy

MakeStore = Callable[..., EmbeddingStore]
NARROW = dataclasses.replace(LARGE, hidden_size=10_000)


@pytest.fixture
def store(shared_redis: EmbeddedRedis, make_store: MakeStore) -> EmbeddingStore:
    return make_store(shared_redis.url)


# --- a value that does not belong to its key ------------------------------------------------------------------------


def flip(entry: bytes, offset: int) -> bytes:
    return entry[:offset] + bytes([entry[offset] ^ 1]) + entry[offset + 1 :]


KEY, OTHER_KEY = fresh_key(), fresh_key()
ENTRY = make_entry(KEY, LARGE, make_rows(LARGE))
DAMAGED = {
    MissReason.TOO_SHORT: [b"hello", ENTRY[:4095]],
    MissReason.LENGTH: [ENTRY[:4096], ENTRY[:-1], ENTRY + b"\0", ENTRY + ENTRY],
    MissReason.BAD_MAGIC: [b"x" * 5000, flip(ENTRY, 0)],
    MissReason.OTHER_VERSION: [flip(ENTRY, 8)],
    MissReason.HEADER_SEAL: [flip(ENTRY, 50), flip(ENTRY, 3000), flip(ENTRY, 4095)],
    MissReason.WRONG_KEY: [make_entry(OTHER_KEY, LARGE, make_rows(LARGE))],
    MissReason.OTHER_SHAPE: [make_entry(KEY, meta, make_rows(meta)) for meta in (SMALL, NARROW)],
    MissReason.BLOCK_SEAL: [flip(ENTRY, 4096), flip(ENTRY, len(ENTRY) - 1)],
}


@pytest.mark.parametrize(
    ("reason", "value"),
    [
        pytest.param(reason, value, id=f"{reason.value}-{i}")
        for reason in DAMAGED
        for i, value in enumerate(DAMAGED[reason])
    ],
)
def test_a_damaged_entry_is_a_miss_with_a_reason_and_is_deleted(
    store: EmbeddingStore, shared_admin: Any, reason: MissReason, value: bytes
) -> None:
    shared_admin.set(data_key(KEY), value)
    assert read_all(store, KEY) is reason
    assert not shared_admin.exists(data_key(KEY))
    assert store.stats.snapshot()["delete", "discarded"] == 1
    assert write(store, KEY, LARGE, memoryview(make_rows(LARGE)))
    assert read_all(store, KEY) == make_rows(LARGE)
    assert remove(store, KEY)


@pytest.mark.parametrize(
    "reason", [reason for reason in DAMAGED if reason not in (MissReason.BLOCK_SEAL, MissReason.OTHER_SHAPE)]
)
def test_stat_sees_all_damage_but_that_of_rows(store: EmbeddingStore, shared_admin: Any, reason: MissReason) -> None:
    for value in DAMAGED[reason]:
        shared_admin.set(data_key(KEY), value)
        assert store.stat(KEY) is None
        assert not shared_admin.exists(data_key(KEY))
    assert store.stats.snapshot()["stat", reason.value] == len(DAMAGED[reason])


def test_damage_in_one_block_does_not_spoil_rows_of_another(store: EmbeddingStore, shared_admin: Any) -> None:
    key = fresh_key()
    entry = make_entry(key, LARGE, make_rows(LARGE))
    shared_admin.set(data_key(key), flip(entry, len(entry) - 1))
    assert read(store, key, LARGE, 0, 13) == make_rows(LARGE)[: 13 * LARGE.row_bytes]
    assert read(store, key, LARGE, 50, 53) is MissReason.BLOCK_SEAL


def test_swapped_values_of_two_keys_are_noticed(store: EmbeddingStore, shared_admin: Any) -> None:
    keys = fresh_key(), fresh_key()
    for seed, key in enumerate(keys):
        write(store, key, SMALL, memoryview(make_rows(SMALL, seed)))
    values = [shared_admin.get(data_key(key)) for key in keys]
    for key, value in zip(keys, reversed(values), strict=True):
        shared_admin.set(data_key(key), value)
    assert [read(store, key, SMALL, 0, 7) for key in keys] == [MissReason.WRONG_KEY] * 2


def test_another_type_of_value_is_a_miss_and_is_deleted(store: EmbeddingStore, shared_admin: Any) -> None:
    key = fresh_key()
    for ask in (store.stat, lambda key: store.read_rows(key, 0, 1, memoryview(bytearray(SMALL.row_bytes)))):
        shared_admin.rpush(data_key(key), "a")
        assert ask(key) in (None, MissReason.WRONG_TYPE)
        assert not shared_admin.exists(data_key(key))


def test_damaged_metadata_is_deleted_without_the_rows(store: EmbeddingStore, shared_admin: Any) -> None:
    key = fresh_key()
    write(store, key, SMALL, memoryview(make_rows(SMALL)))
    record = shared_admin.get(metadata_key(key))
    for value in (record[:-1], record + b"\0" * 100, flip(record, 50), b"hello"):
        shared_admin.set(metadata_key(key), value)
        assert store.metadata(key) is None
        assert not shared_admin.exists(metadata_key(key))
    assert store.stat(key) == SMALL


# --- an entry that changes while it is read -------------------------------------------------------------------------


def test_an_eviction_between_header_and_rows_is_a_miss(
    fault_proxy: FaultProxy, make_store: MakeStore, shared_admin: Any
) -> None:
    store, key = make_store(fault_proxy.url), fresh_key()
    write(store, key, LARGE, memoryview(make_rows(LARGE)))
    fault_proxy.faults.before_rows = lambda: shared_admin.delete(data_key(key))
    assert read_all(store, key) is MissReason.EVICTED
    fault_proxy.faults.before_rows = None
    assert read_all(store, key) is MissReason.ABSENT


def test_an_entry_cut_short_between_header_and_rows_is_noticed(
    fault_proxy: FaultProxy, make_store: MakeStore, shared_admin: Any
) -> None:
    store, key = make_store(fault_proxy.url), fresh_key()
    entry = make_entry(key, LARGE, make_rows(LARGE))
    shared_admin.set(data_key(key), entry)

    def cut_once() -> None:
        # Once only: the requests for further pieces would plant the value again after the reader has deleted it.
        fault_proxy.faults.before_rows = None
        shared_admin.set(data_key(key), entry[:5000])

    fault_proxy.faults.before_rows = cut_once
    assert read_all(store, key) is MissReason.LENGTH
    assert not shared_admin.exists(data_key(key))


def test_a_read_has_at_most_four_pieces_in_flight(fault_proxy: FaultProxy, make_store: MakeStore) -> None:
    store, key, rows = make_store(fault_proxy.url, budget_s=30), fresh_key(), make_rows(LARGE)
    write(store, key, LARGE, memoryview(rows))
    fault_proxy.faults.before_rows = fault_proxy.may_reply.clear
    results: list[bytes | MissReason] = []
    reader = threading.Thread(target=lambda: results.append(read_all(store, key)))
    reader.start()
    while fault_proxy.num_row_requests < 4:
        time.sleep(0.01)
    # Time for a fifth request to show up.
    time.sleep(0.2)
    num_outstanding = fault_proxy.num_row_requests
    fault_proxy.faults.before_rows = None
    fault_proxy.may_reply.set()
    reader.join()
    assert num_outstanding == 4
    assert results == [rows]


def test_an_entry_replaced_while_it_is_read_is_read_again(
    fault_proxy: FaultProxy, make_store: MakeStore, shared_admin: Any
) -> None:
    store, key, rows = make_store(fault_proxy.url), fresh_key(), make_rows(LARGE, seed=2)
    write(store, key, LARGE, memoryview(make_rows(LARGE, seed=1)))

    def replace_once() -> None:
        fault_proxy.faults.before_rows = None
        shared_admin.set(data_key(key), make_entry(key, LARGE, rows))

    fault_proxy.faults.before_rows = replace_once
    assert read_all(store, key) == rows


def test_an_entry_replaced_again_and_again_is_a_miss_and_stays(
    fault_proxy: FaultProxy, make_store: MakeStore, shared_admin: Any
) -> None:
    store, key = make_store(fault_proxy.url), fresh_key()
    shared_admin.set(data_key(key), make_entry(key, LARGE, secrets.token_bytes(LARGE.size_bytes)))

    def replace() -> None:
        shared_admin.set(data_key(key), make_entry(key, LARGE, secrets.token_bytes(LARGE.size_bytes)))

    fault_proxy.faults.before_rows = replace
    assert read_all(store, key) is MissReason.GENERATION
    assert shared_admin.exists(data_key(key))
