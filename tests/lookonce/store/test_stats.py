"""The store's counters add up from all threads."""

from __future__ import annotations

import threading

from lookonce.store.stats import StoreOperation, StoreStats


def test_counts_are_kept_by_operation_and_outcome() -> None:
    stats = StoreStats()
    stats.count(StoreOperation.STAT, "ok")
    stats.count(StoreOperation.STAT, "ok")
    stats.count(StoreOperation.STAT, "absent")
    stats.count(StoreOperation.WRITE, "ok")
    assert stats.snapshot() == {("stat", "ok"): 2, ("stat", "absent"): 1, ("write", "ok"): 1}


def test_a_snapshot_does_not_change_later() -> None:
    stats = StoreStats()
    snapshot = stats.snapshot()
    stats.count(StoreOperation.PING, "ok")
    assert snapshot == {}


def test_no_count_of_concurrent_threads_is_lost() -> None:
    stats, num_threads, num_counts = StoreStats(), 8, 1000
    together = threading.Barrier(num_threads)

    def count() -> None:
        together.wait(10)
        for _ in range(num_counts):
            stats.count(StoreOperation.READ_ROWS, "ok")
            stats.add_bytes_read(3)

    threads = [threading.Thread(target=count) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.snapshot() == {("read_rows", "ok"): num_threads * num_counts}
    assert stats.bytes_read == 3 * num_threads * num_counts
