"""The local cache never exceeds its capacity, and images shown once do not evict those shown often."""

from __future__ import annotations

from hypothesis import given, strategies

from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from lookonce.embedding_meta import EmbeddingMeta, RowDtype


def entry(num_rows: int) -> LocalEmbedding:
    """An entry whose rows take 8 bytes each."""
    meta = EmbeddingMeta(num_rows, 2, 0, RowDtype.FLOAT32, 10, 10)
    return LocalEmbedding(meta, memoryview(bytes(meta.size_bytes)))


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = LocalCache(24)
    for key in (b"a", b"b", b"c"):
        cache.put(key, entry(1))
    assert cache.get(b"a") is not None
    cache.put(b"d", entry(1))
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_images_shown_once_do_not_push_out_those_shown_again() -> None:
    cache = LocalCache(10 * 8)
    for key in (b"hot", b"warm"):
        cache.put(key, entry(2))
        assert cache.get(key) is not None
    for number in range(100):
        cache.put(b"once %d" % number, entry(3))
        assert b"once %d" % number in cache, "what was just encoded is about to be read"
    assert b"hot" in cache
    assert b"warm" in cache
    assert cache.num_evictions == 98


def test_hot_entries_cool_down_when_there_are_too_many() -> None:
    cache = LocalCache(10 * 8)
    for number in range(10):
        cache.put(b"%d" % number, entry(1))
        assert cache.get(b"%d" % number) is not None
    for name in (b"a", b"b"):
        cache.put(name, entry(1))
    assert [b"%d" % number in cache for number in range(10)] == [False, False] + [True] * 8


def test_an_entry_over_the_capacity_is_not_kept_and_evicts_nothing() -> None:
    cache = LocalCache(16)
    cache.put(b"small", entry(1))
    cache.put(b"large", entry(3))
    assert cache.get(b"large") is None
    assert cache.get(b"small") is not None


def test_a_capacity_of_zero_keeps_nothing() -> None:
    cache = LocalCache(0)
    cache.put(b"a", entry(1))
    assert len(cache) == 0


@given(
    strategies.integers(0, 100),
    strategies.lists(
        strategies.tuples(strategies.sampled_from("pgr"), strategies.binary(max_size=1), strategies.integers(1, 6))
    ),
)
def test_bytes_are_counted_exactly_and_bounded(capacity_bytes: int, operations: list[tuple[str, bytes, int]]) -> None:
    cache = LocalCache(capacity_bytes)
    held: dict[bytes, LocalEmbedding] = {}
    for operation, key, num_rows in operations:
        if operation == "p":
            held[key] = entry(num_rows)
            cache.put(key, held[key])
        elif operation == "g":
            assert cache.get(key) in (None, held.get(key))
        else:
            cache.remove(key)
            assert cache.get(key) is None
        kept = [found for found in map(cache.get, list(held)) if found is not None]
        assert cache.num_bytes == sum(found.rows.nbytes for found in kept) <= capacity_bytes
        assert len(cache) == len(kept)
