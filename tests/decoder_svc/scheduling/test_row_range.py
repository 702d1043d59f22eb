from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.scheduling.row_range import RowRange, RowRangeSet

ranges = st.tuples(st.integers(0, 20), st.integers(1, 6)).map(lambda pair: RowRange(pair[0], pair[0] + pair[1]))


def members(held: RowRangeSet | list[RowRange]) -> set[int]:
    return {row for each in held for row in range(each.start, each.stop)}


@given(st.lists(st.tuples(st.booleans(), ranges), max_size=12), ranges)
def test_a_set_of_ranges_is_the_set_of_its_rows(changes: list[tuple[bool, RowRange]], wanted: RowRange) -> None:
    held, expected = RowRangeSet(), set[int]()
    for is_added, each in changes:
        (held.add if is_added else held.remove)(each)
        rows = set(range(each.start, each.stop))
        expected = expected | rows if is_added else expected - rows
        assert members(held) == expected
        assert held.num_rows == len(expected)
        assert bool(held) == bool(expected)
        found = list(held)
        assert all(one.stop < other.start for one, other in itertools.pairwise(found)), "few, ascending, apart"
    assert members(held.missing(wanted)) == set(range(wanted.start, wanted.stop)) - expected


def test_a_copy_is_a_set_of_its_own() -> None:
    first = RowRangeSet([RowRange(0, 4)])
    second = RowRangeSet(first)
    second.remove(RowRange(1, 2))
    assert list(first) == [RowRange(0, 4)]
