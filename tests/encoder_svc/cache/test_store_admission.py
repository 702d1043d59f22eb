"""Rows are stored when, by the measured times, reading them is faster than encoding them again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.cache.store_admission import ALWAYS_STORED_BYTES, StoreAdmission
from encoder_svc.metrics import EncoderMetrics
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from tests.lookonce.store.entries import fresh_key
from tests.lookonce.store.faults import FaultProxy

MB = 1_000_000
SLOW_LINK = 1.0 / (10 * MB)


def measured(s_per_byte: float) -> StoreAdmission:
    admission = StoreAdmission()
    for _ in range(3):
        admission.note_write(20 * MB, 20 * MB * s_per_byte)
    return admission


def test_until_it_has_measured_everything_is_stored() -> None:
    admission = StoreAdmission()
    admission.note_write(20 * MB, 1000.0)
    admission.note_write(20 * MB, 1000.0)
    assert admission.admit(20 * MB, 0.0)


def test_rows_that_take_longer_to_read_than_to_make_are_not_stored() -> None:
    admission = measured(SLOW_LINK)
    assert admission.admit(20 * MB, 2.1)
    assert not admission.admit(20 * MB, 1.9)


def test_small_rows_are_always_stored_and_measure_nothing() -> None:
    admission = measured(SLOW_LINK)
    assert admission.admit(ALWAYS_STORED_BYTES, 0.0)
    before = admission.s_per_byte
    admission.note_write(ALWAYS_STORED_BYTES, 100.0)
    assert admission.s_per_byte == before


def test_a_link_that_has_become_faster_is_noticed() -> None:
    admission = measured(SLOW_LINK)
    num_asked = 0
    while not admission.admit(20 * MB, 0.1) or admission.s_per_byte > SLOW_LINK / 25:
        num_asked += 1
        if num_asked % 16 == 0:
            admission.note_write(20 * MB, 20 * MB * SLOW_LINK / 100)
        assert num_asked < 1000


@given(st.lists(st.tuples(st.integers(1, 200 * MB), st.floats(0, 100)), max_size=30), st.integers(1, 200 * MB))
def test_rows_of_unknown_cost_are_always_stored(writes: list[tuple[int, float]], num_bytes: int) -> None:
    admission = StoreAdmission()
    for size, duration_s in writes:
        admission.note_write(size, duration_s)
    assert admission.admit(num_bytes, float("inf"))


async def test_a_link_too_slow_for_the_budget_is_learnt_from_writes_that_are_given_up() -> None:
    with EmbeddedRedis(256 << 20) as server:
        proxy = FaultProxy(server.url.removeprefix("unix://"))
        store = EmbeddingStore(proxy.url, 0.2, 60, 64 << 20)
        metrics = EncoderMetrics(CollectorRegistry())
        tiers = CacheTiers(LocalCache(256 << 20), store, metrics, num_threads=1)
        meta = EmbeddingMeta(2000, 2000, 0, RowDtype.FLOAT32, 100, 100)
        rows = memoryview(bytes(meta.size_bytes))
        try:
            assert store.ping()
            for _ in range(3):
                # The server has answered and then takes the rows too slowly.
                proxy.faults.request_bytes_per_s = 10 * MB
                assert not await tiers.put(fresh_key(), LocalEmbedding(meta, rows, encode_s=0.001), refresh=False)
            assert store.stats.snapshot()["write", "slow"] == 3
            assert not await tiers.put(fresh_key(), LocalEmbedding(meta, rows, encode_s=0.001), refresh=False)
            assert metrics.not_worth_storing._value.get() == 1
        finally:
            tiers.close()
            store.close()
            proxy.close()


async def test_rows_that_are_not_worth_storing_stay_in_this_process(shared_redis: EmbeddedRedis) -> None:
    store = EmbeddingStore(shared_redis.url, 5.0, 60, 64 << 20)
    metrics = EncoderMetrics(CollectorRegistry())
    tiers = CacheTiers(LocalCache(64 << 20), store, metrics, num_threads=1)
    meta = EmbeddingMeta(400, 2000, 0, RowDtype.FLOAT32, 100, 100)
    rows = memoryview(bytes(meta.size_bytes))
    try:
        for _ in range(3):
            assert await tiers.put(fresh_key(), LocalEmbedding(meta, rows, encode_s=1.0), refresh=False)
        cheap = fresh_key()
        assert not await tiers.put(cheap, LocalEmbedding(meta, rows, encode_s=0.0), refresh=False)
        entry = tiers.find_local(cheap)
        assert entry is not None
        assert not await tiers.keep_stored(cheap, entry), "a hit must not store it after all"
        assert store.stat(cheap) is None
        assert (await tiers.read(cheap, 0, 0)).rows == rows
        assert metrics.not_worth_storing._value.get() == 2
    finally:
        tiers.close()
        store.close()
