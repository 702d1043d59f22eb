from __future__ import annotations

from lookonce.uncounted_rows import UncountedRows


def test_rows_are_taken_once() -> None:
    uncounted = UncountedRows()
    uncounted.add(b"x", 4)
    uncounted.add(b"y", 2)
    assert (uncounted.take(b"x"), uncounted.take(b"x"), uncounted.take(b"z")) == (4, 0, 0)
    assert uncounted.num_rows == 2


def test_rows_above_the_limit_stay_for_the_next() -> None:
    uncounted = UncountedRows()
    uncounted.add(b"x", 4)
    uncounted.add(b"x", 4)
    assert [uncounted.take(b"x", 5) for _ in range(3)] == [5, 3, 0]


def test_no_rows_leave_no_trace() -> None:
    uncounted = UncountedRows(max_images=1)
    uncounted.add(b"x", 4)
    uncounted.add(b"y", 0)
    assert uncounted.take(b"x", 0) == 0
    assert uncounted.num_rows == 4


def test_with_too_many_images_the_oldest_count_is_dropped() -> None:
    uncounted = UncountedRows(max_images=2)
    for key in (b"x", b"y", b"z"):
        uncounted.add(key, 1)
    assert [uncounted.take(key) for key in (b"x", b"y", b"z")] == [0, 1, 1]
