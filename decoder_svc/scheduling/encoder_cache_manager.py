"""Accounting of the embedding rows on the device: what is there, on its way, needed, and what may go. No tensors.

Rows are kept by content key and shared by all requests. Whoever needs some of an image's rows says which; rows that
nobody needs leave in the order in which the images were released. When those are not enough, a request that cannot go
on otherwise may also take rows that only requests behind it need (the scheduler says which may): so the first one can
always go on, provided the cache holds the rows of the largest image and one block beside (encoder_budget.py).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from decoder_svc.scheduling.request import Request, RequestId, RequestState
from decoder_svc.scheduling.row_range import RowRange, RowRangeSet, RowSource
from lookonce.content_key import ContentKey
from lookonce.forgotten import Forgotten


class RowUser(NamedTuple):
    """One showing of an image in a request; orders like the requests are served."""

    is_waiting: bool
    priority: int
    arrival_s: float
    request_id: RequestId
    image_index: int


def row_user(request: Request, image_index: int) -> RowUser:
    """The user that a request is for its image `image_index`, in its present state."""
    is_waiting = request.state is not RequestState.RUNNING
    return RowUser(is_waiting, request.priority, request.arrival_s, request.request_id, image_index)


@dataclass(slots=True)
class _Entry:
    resident: RowRangeSet = field(default_factory=RowRangeSet)
    arriving: RowRangeSet = field(default_factory=RowRangeSet)
    # Of the rows that arrived last; None before any did.
    source: RowSource | None = None
    needed: dict[tuple[RequestId, int], tuple[RowUser, RowRange]] = field(default_factory=dict)
    # Goes as soon as nobody needs it.
    is_forgotten: bool = False

    @property
    def num_rows(self) -> int:
        return self.resident.num_rows + self.arriving.num_rows

    def spare(self, behind: RowUser | None) -> list[RowRange]:
        """Resident rows that nobody needs, or with `behind` that only users behind that one need."""
        spare = RowRangeSet(self.resident)
        for user, rows in self.needed.values():
            if behind is None or user <= behind:
                spare.remove(rows)
        return list(spare)


class EncoderCacheManager:
    """Budgeted in embedding rows. Only `reserve` evicts; every other method that returns something is a question."""

    def __init__(self, num_rows: int) -> None:
        self.capacity_rows = num_rows
        self._num_reserved_rows = 0
        # Oldest release first.
        self._entries: OrderedDict[ContentKey, _Entry] = OrderedDict()
        self._evicted: list[tuple[ContentKey, RowRange]] = []
        # Changes whenever a question may be answered differently.
        self.version = 0

    @property
    def num_reserved_rows(self) -> int:
        """Rows that are resident or on their way."""
        return self._num_reserved_rows

    def first_missing_row(self, key: ContentKey, rows: RowRange) -> int | None:
        """The first of these rows that cannot be used in this step; None when all can."""
        entry = self._entries.get(key)
        missing = entry.resident.missing(rows) if entry is not None else [rows]
        return missing[0].start if missing else None

    def unasked(self, key: ContentKey, rows: RowRange) -> list[RowRange]:
        """The parts of these rows that are neither resident nor on their way."""
        entry = self._entries.get(key)
        if entry is None:
            return [rows]
        return [part for gap in entry.resident.missing(rows) for part in entry.arriving.missing(gap)]

    def is_any_arriving(self, key: ContentKey, rows: RowRange) -> bool:
        """Whether some of these rows are on their way."""
        entry = self._entries.get(key)
        return entry is not None and entry.arriving.missing(rows) != [rows]

    def source(self, key: ContentKey) -> RowSource | None:
        """Where resident rows came from; None when there are none."""
        entry = self._entries.get(key)
        return entry.source if entry is not None else None

    def can_reserve(self, num_rows: int, displacing: RowUser | None = None) -> bool:
        """Whether room for `num_rows` more rows can be made, if need be from users behind `displacing`."""
        room = self.capacity_rows - self._num_reserved_rows
        if num_rows <= room:
            return True
        spare = sum(len(rows) for entry in self._entries.values() for rows in entry.spare(displacing))
        return num_rows <= room + spare

    def reserve(self, key: ContentKey, rows: RowRange, displacing: RowUser | None = None) -> None:
        """Makes room and notes that the rows are on their way. The caller has asked `unasked` and `can_reserve`."""
        self._make_room(len(rows), None)
        if displacing is not None:
            self._make_room(len(rows), displacing)
        assert self._num_reserved_rows + len(rows) <= self.capacity_rows, "reserve() without asking can_reserve()"
        entry = self._entries.setdefault(key, _Entry())
        assert entry.resident.missing(rows) == [rows] == entry.arriving.missing(rows), "rows were reserved twice"
        entry.arriving.add(rows)
        self._num_reserved_rows += len(rows)
        self.version += 1

    def need(self, key: ContentKey, user: RowUser, rows: RowRange) -> None:
        """Notes which rows a user has yet to take, in place of what it said before. They need not be here yet."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.needed.get((user.request_id, user.image_index)) != (user, rows):
            entry.needed[user.request_id, user.image_index] = (user, rows)
            self.version += 1

    def release(self, key: ContentKey, request_id: RequestId, image_index: int) -> None:
        """The user needs the image no more; the rows stay until their room is needed."""
        entry = self._entries.get(key)
        if entry is None or entry.needed.pop((request_id, image_index), None) is None:
            return
        self.version += 1
        if not entry.needed:
            self._entries.move_to_end(key)
        self._drop_if_forgotten(key)
        self._drop_if_empty(key)

    def arrived(self, key: ContentKey, rows: RowRange, source: RowSource) -> bool:
        """The rows are on the device. False when they are not expected any more: they must be dropped."""
        entry = self._entries.get(key)
        if entry is None or entry.arriving.missing(rows):
            return False
        if entry.is_forgotten and not entry.needed:
            self.drop(key, rows)
            return False
        entry.arriving.remove(rows)
        entry.resident.add(rows)
        entry.source = source
        self.version += 1
        return True

    def drop(self, key: ContentKey, rows: RowRange) -> None:
        """Forgets rows that will not arrive."""
        entry = self._entries.get(key)
        if entry is None or entry.arriving.missing(rows):
            return
        entry.arriving.remove(rows)
        self._num_reserved_rows -= len(rows)
        self.version += 1
        self._drop_if_empty(key)

    def forget(self, forgotten: Forgotten) -> None:
        """Rows of these images go at once, or when those who need them now are done."""
        for key in [key for key in self._entries if forgotten.includes(key.value)]:
            self._entries[key].is_forgotten = True
            self._drop_if_forgotten(key)

    def is_forgotten(self, key: ContentKey) -> bool:
        """Whether rows of this image are here only for those who needed them when it was to be forgotten."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_forgotten

    def take_evicted(self) -> tuple[tuple[ContentKey, RowRange], ...]:
        """Rows evicted since the last call; the runner frees them before others of the same key arrive."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return evicted

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounting is off."""
        assert self._num_reserved_rows == sum(entry.num_rows for entry in self._entries.values()), "rows were lost"
        assert self._num_reserved_rows <= self.capacity_rows, "over the budget"
        assert all(entry.num_rows or entry.needed for entry in self._entries.values()), "an empty entry was kept"

    def num_uses(self) -> int:
        """Needs of live requests; 0 when idle."""
        return sum(len(entry.needed) for entry in self._entries.values())

    def _make_room(self, num_rows: int, displacing: RowUser | None) -> None:
        """Evicts no more than it must; rows on their way stay, their answer must find its place."""
        for key, entry in list(self._entries.items()):
            for rows in entry.spare(displacing):
                num_missing = self._num_reserved_rows + num_rows - self.capacity_rows
                if num_missing <= 0:
                    return
                self._evict(key, entry, RowRange(max(rows.start, rows.stop - num_missing), rows.stop))

    def _evict(self, key: ContentKey, entry: _Entry, rows: RowRange) -> None:
        entry.resident.remove(rows)
        self._num_reserved_rows -= len(rows)
        self.version += 1
        self._evicted.append((key, rows))
        self._drop_if_empty(key)

    def _drop_if_forgotten(self, key: ContentKey) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.is_forgotten and not entry.needed:
            for rows in list(entry.resident):
                self._evict(key, entry, rows)

    def _drop_if_empty(self, key: ContentKey) -> None:
        entry = self._entries.get(key)
        if entry is not None and not entry.num_rows and not entry.needed:
            del self._entries[key]
