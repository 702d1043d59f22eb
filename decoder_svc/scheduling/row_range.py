"""Ranges of embedding rows, and sets of ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RowRange:
    """Rows [start, stop) of one image; never empty."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class RowRangeSet:
    """A set of rows of one image, kept as few ranges: disjoint, ascending, adjacent ones merged."""

    def __init__(self, ranges: Iterable[RowRange] = ()) -> None:
        """`ranges` are disjoint and ascending."""
        self._ranges = list(ranges)

    def __iter__(self) -> Iterator[RowRange]:
        return iter(self._ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    @property
    def num_rows(self) -> int:
        """Number of rows in all ranges."""
        return sum(len(each) for each in self._ranges)

    def add(self, added: RowRange) -> None:
        """Adds rows; some may be in the set already."""
        start, stop = added.start, added.stop
        apart: list[RowRange] = []
        for each in self._ranges:
            if each.stop < start or each.start > stop:
                apart.append(each)
            else:
                start, stop = min(start, each.start), max(stop, each.stop)
        self._ranges = sorted([*apart, RowRange(start, stop)])

    def remove(self, removed: RowRange) -> None:
        """Removes rows; some may be absent from the set."""
        rest: list[RowRange] = []
        for each in self._ranges:
            if each.start < min(each.stop, removed.start):
                rest.append(RowRange(each.start, min(each.stop, removed.start)))
            if max(each.start, removed.stop) < each.stop:
                rest.append(RowRange(max(each.start, removed.stop), each.stop))
        self._ranges = rest

    def missing(self, wanted: RowRange) -> list[RowRange]:
        """Returns the parts of `wanted` that are not in the set, ascending."""
        parts: list[RowRange] = []
        start = wanted.start
        for each in self._ranges:
            if each.stop <= start:
                continue
            if each.start >= wanted.stop:
                break
            if each.start > start:
                parts.append(RowRange(start, each.start))
            start = each.stop
        if start < wanted.stop:
            parts.append(RowRange(start, wanted.stop))
        return parts
