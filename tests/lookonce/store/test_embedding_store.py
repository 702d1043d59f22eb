"""The store returns exactly the rows that were written to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.errors import ConfigurationError
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store import codec as embedding_codec
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.miss_reason import MissReason
from tests.lookonce.store.entries import LARGE, SMALL, data_key, fresh_key, make_rows, metadata_key, read, write

MakeStore = Callable[..., EmbeddingStore]


@pytest.fixture
def store(shared_redis: EmbeddedRedis, make_store: MakeStore) -> EmbeddingStore:
    return make_store(shared_redis.url)


@pytest.fixture(scope="module")
def lasting_store(shared_redis: EmbeddedRedis) -> EmbeddingStore:
    return EmbeddingStore(shared_redis.url, 5.0, 60, 64 << 20)


# --- what is written comes back -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    meta=st.builds(
        EmbeddingMeta,
        num_rows=st.integers(1, 40),
        hidden_size=st.integers(1, 32),
        num_levels=st.integers(0, 3),
        dtype=st.sampled_from(RowDtype),
        image_width=st.integers(1, 4096),
        image_height=st.integers(1, 4096),
    ),
    data=st.data(),
)
def test_any_shape_and_range_comes_back_bit_equal(
    lasting_store: EmbeddingStore, meta: EmbeddingMeta, data: st.DataObject
) -> None:
    key, rows = fresh_key(), make_rows(meta)
    start = data.draw(st.integers(0, meta.num_rows - 1))
    stop = data.draw(st.integers(start + 1, meta.num_rows))
    assert write(lasting_store, key, meta, memoryview(rows))
    assert lasting_store.stat(key) == meta
    assert lasting_store.metadata(key) == meta
    assert read(lasting_store, key, meta, start, stop) == rows[start * meta.row_bytes : stop * meta.row_bytes]


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (0, 1), (12, 14), (13, 26), (30, 60), (59, 60), (5, 58)])
def test_ranges_over_several_blocks_come_back_bit_equal(store: EmbeddingStore, start: int, stop: int) -> None:
    key, rows = fresh_key(), make_rows(LARGE)
    assert write(store, key, LARGE, memoryview(rows))
    assert read(store, key, LARGE, start, stop) == rows[start * LARGE.row_bytes : stop * LARGE.row_bytes]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (5, 58), (59, 60)])
def test_readers_that_know_the_number_of_rows_get_the_same_ranges(store: EmbeddingStore, start: int, stop: int) -> None:
    key, rows = fresh_key(), make_rows(LARGE)
    assert write(store, key, LARGE, memoryview(rows))
    out = bytearray((stop - start) * LARGE.row_bytes)
    assert store.read_rows(key, start, stop, memoryview(out), num_rows=LARGE.num_rows) is None
    assert out == rows[start * LARGE.row_bytes : stop * LARGE.row_bytes]


def test_entries_with_other_blocks_than_expected_and_absent_ones_leave_the_connection_in_use(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(own_redis.url)
    other, absent, rows = fresh_key(), fresh_key(), make_rows(LARGE)
    with monkeypatch.context() as patched:
        patched.setattr(embedding_codec, "BLOCK_TARGET_BYTES", 3 * LARGE.row_bytes)
        assert write(store, other, LARGE, memoryview(rows))
    num_connections = admin.info("stats")["total_connections_received"]
    out = bytearray(50 * LARGE.row_bytes)
    for _ in range(3):
        assert store.read_rows(other, 5, 55, memoryview(out), num_rows=LARGE.num_rows) is None
        assert out == rows[5 * LARGE.row_bytes : 55 * LARGE.row_bytes]
        assert store.read_rows(absent, 5, 55, memoryview(out), num_rows=LARGE.num_rows) is MissReason.ABSENT
    assert admin.info("stats")["total_connections_received"] == num_connections


@pytest.mark.parametrize("num_rows", [LARGE.num_rows - 1, LARGE.num_rows + 1, 3 * LARGE.num_rows])
def test_an_entry_with_another_number_of_rows_than_expected_is_read_by_its_own(
    store: EmbeddingStore, num_rows: int
) -> None:
    key, rows = fresh_key(), make_rows(LARGE)
    assert write(store, key, LARGE, memoryview(rows))
    out = bytearray(20 * LARGE.row_bytes)
    assert store.read_rows(key, 5, 25, memoryview(out), num_rows=num_rows) is None
    assert out == rows[5 * LARGE.row_bytes : 25 * LARGE.row_bytes]


def test_blocks_larger_than_a_piece_come_back_bit_equal(store: EmbeddingStore) -> None:
    meta = EmbeddingMeta(3, 700_000, 0, RowDtype.FLOAT32, 1, 1)
    key, rows = fresh_key(), make_rows(meta)
    assert write(store, key, meta, memoryview(rows))
    assert read(store, key, meta, 1, 3) == rows[meta.row_bytes :]


def test_an_unknown_key_is_absent(store: EmbeddingStore) -> None:
    key = fresh_key()
    assert store.stat(key) is None
    assert store.metadata(key) is None
    assert read(store, key, SMALL, 0, 1) is MissReason.ABSENT
    assert not store.touch(key)


def test_an_image_is_one_key_with_a_time_to_live_and_longer_lived_metadata(
    store: EmbeddingStore, shared_admin: Any
) -> None:
    key = fresh_key()
    write(store, key, SMALL, memoryview(make_rows(SMALL)))
    assert {name.decode() for name in shared_admin.keys(f"*{key.hex}*")} == {data_key(key), metadata_key(key)}
    assert 0 < shared_admin.ttl(data_key(key)) <= 60 < shared_admin.ttl(metadata_key(key)) <= 420


def test_the_metadata_outlives_the_rows(store: EmbeddingStore, shared_admin: Any) -> None:
    key = fresh_key()
    write(store, key, SMALL, memoryview(make_rows(SMALL)))
    shared_admin.delete(data_key(key))
    assert store.stat(key) is None
    assert store.metadata(key) == SMALL


def test_touch_resets_the_time_to_live(store: EmbeddingStore, shared_admin: Any) -> None:
    key = fresh_key()
    write(store, key, SMALL, memoryview(make_rows(SMALL)))
    shared_admin.expire(data_key(key), 5)
    shared_admin.expire(metadata_key(key), 5)
    assert store.touch(key)
    assert shared_admin.ttl(data_key(key)) > 50
    assert shared_admin.ttl(metadata_key(key)) > 400


def test_the_first_writers_rows_stay(store: EmbeddingStore) -> None:
    key, rows = fresh_key(), make_rows(SMALL, seed=1)
    assert write(store, key, SMALL, memoryview(rows))
    assert write(store, key, SMALL, memoryview(make_rows(SMALL, seed=2)))
    assert read(store, key, SMALL, 0, 7) == rows
    assert store.stats.snapshot()["write", "exists"] == 1


def test_one_of_many_concurrent_writers_wins_with_a_whole_entry(store: EmbeddingStore) -> None:
    key, candidates = fresh_key(), [make_rows(LARGE, seed) for seed in range(4)]
    results: list[bool] = []
    barrier = threading.Barrier(len(candidates))

    def write_together(rows: bytes) -> None:
        barrier.wait()
        results.append(write(store, key, LARGE, memoryview(rows)))

    threads = [threading.Thread(target=write_together, args=(rows,)) for rows in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert store.stats.snapshot()["write", "ok"] == 1
    assert read(store, key, LARGE, 0, 60) in candidates


def test_threads_share_one_store(store: EmbeddingStore) -> None:
    entries = {fresh_key(): make_rows(LARGE, seed) for seed in range(4)}
    results: list[bool] = []

    def use(key: ContentKey, rows: bytes) -> None:
        write(store, key, LARGE, memoryview(rows))
        results.extend(read(store, key, LARGE, 0, 60) == rows for _ in range(5))

    threads = [threading.Thread(target=use, args=entry) for entry in entries.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


# --- what is not written --------------------------------------------------------------------------------------------


def test_an_entry_over_the_cap_is_not_sent(shared_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store, key = make_store(shared_redis.url, max_entry_bytes=4096 + SMALL.size_bytes - 1), fresh_key()
    assert not write(store, key, SMALL, memoryview(make_rows(SMALL)))
    assert store.stat(key) is None
    assert store.metadata(key) is None
    assert store.stats.snapshot()["write", "too_large"] == 1
    assert write(
        make_store(shared_redis.url, max_entry_bytes=4096 + SMALL.size_bytes), key, SMALL, memoryview(make_rows(SMALL))
    )


def test_an_entry_over_an_eighth_of_the_servers_memory_is_not_sent(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore
) -> None:
    admin.config_set("maxmemory", 32 << 20)
    store, other = make_store(own_redis.url), fresh_key()
    write(store, other, SMALL, memoryview(make_rows(SMALL)))
    assert not write(store, fresh_key(), LARGE, memoryview(make_rows(LARGE)))
    assert store.stats.snapshot()["write", "too_large"] == 1
    assert store.stat(other) == SMALL


def test_a_server_without_a_memory_limit_takes_every_entry_under_the_cap(
    own_redis: EmbeddedRedis, admin: Any, make_store: MakeStore
) -> None:
    admin.config_set("maxmemory", 0)
    assert write(make_store(own_redis.url), fresh_key(), LARGE, memoryview(make_rows(LARGE)))


# --- wrong use ------------------------------------------------------------------------------------------------------


def test_a_callers_mistake_is_a_value_error(store: EmbeddingStore) -> None:
    key, out = fresh_key(), memoryview(bytearray(SMALL.row_bytes))
    with pytest.raises(ValueError, match="range"):
        store.read_rows(key, 3, 3, out)
    with pytest.raises(ValueError, match="writable"):
        store.read_rows(key, 0, 1, memoryview(bytes(SMALL.row_bytes)))
    with pytest.raises(ValueError, match="contiguous"):
        store.read_rows(key, 0, 1, memoryview(bytearray(2 * SMALL.row_bytes))[::2])
    with pytest.raises(ValueError, match="rows have"):
        write(store, key, SMALL, memoryview(b"short"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://:hunter2@localhost",
        "redis://:hunter2@localhost:99999",
        "redis://:hunter2@localhost:6379?no_such_option=1",
        "redis://:hunter2@a..b:6379",
        "unix://",
    ],
)
def test_the_error_for_an_unusable_url_does_not_contain_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="expected redis://, rediss:// or unix://") as caught:
        EmbeddingStore(url, 1.0, 60, 1 << 20)
    assert "hunter2" not in str(caught.value)


def test_a_closed_store_only_misses(shared_redis: EmbeddedRedis, make_store: MakeStore) -> None:
    store = make_store(shared_redis.url)
    assert store.ping()
    store.close()
    assert not store.ping()
    assert read(store, fresh_key(), SMALL, 0, 1) is MissReason.STORE_CLOSED
