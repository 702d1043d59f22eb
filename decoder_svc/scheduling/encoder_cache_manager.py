"""Accounting of the embedding rows on the device: resident, in flight, needed, evicted. Holds no tensors.

Rows are kept by content key and shared by all requests. Each request states which rows of an image it needs. Rows that
no request needs are evicted first, the image released longest ago before the others. If that is not enough, a request
that the scheduler names may also evict rows that only requests behind it need. So the first request can always
continue, provided that the cache holds the rows of the largest image plus one block (encoder_budget.py).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from decoder_svc.scheduling.request import Request, RequestId, RequestState
from decoder_svc.scheduling.row_range import RowRange, RowRangeSet
from lookonce.content_key import ContentKey
from lookonce.forgotten import Forgotten


class RowUser(NamedTuple):
    """One use of an image by a request. Sorts in serving order."""

    is_waiting: bool
    priority: int
    turn: int
    arrival_s: float
    request_id: RequestId
    image_index: int


def row_user(request: Request, image_index: int) -> RowUser:
    """Returns the `RowUser` for a request's image at `image_index`, in the request's present state."""
    is_waiting = request.state is not RequestState.RUNNING
    return RowUser(is_waiting, *request.serving_order, image_index)


@dataclass(slots=True)
class _Entry:
    resident: RowRangeSet = field(default_factory=RowRangeSet)
    arriving: RowRangeSet = field(default_factory=RowRangeSet)
    needed: dict[tuple[RequestId, int], tuple[RowUser, RowRange]] = field(default_factory=dict)
    # Whether the rows are evicted as soon as no request needs them.
    is_forgotten: bool = False

    @property
    def num_rows(self) -> int:
        return self.resident.num_rows + self.arriving.num_rows

    def spare(self, behind: RowUser | None) -> list[RowRange]:
        """Returns the resident rows that no user needs, or with `behind` that only users behind that one need."""
        spare = RowRangeSet(self.resident)
        for user, rows in self.needed.values():
            if behind is None or user <= behind:
                spare.remove(rows)
        return list(spare)


class EncoderCacheManager:
    """A cache with a budget in embedding rows. Questions never change state.

    Only `reserve` evicts rows that may be needed again; `forget` evicts rows of removed images.
    """

    def __init__(self, num_rows: int) -> None:
        self.capacity_rows = num_rows
        self._num_reserved_rows = 0
        # The image released longest ago comes first.
        self._entries: OrderedDict[ContentKey, _Entry] = OrderedDict()
        self._evicted: list[tuple[ContentKey, RowRange]] = []
        # Changes whenever a question may get a different answer.
        self.version = 0

    @property
    def num_reserved_rows(self) -> int:
        """Number of rows that are resident or in flight."""
        return self._num_reserved_rows

    def first_missing_row(self, key: ContentKey, rows: RowRange) -> int | None:
        """Returns the first of these rows that is not resident; None if all are."""
        entry = self._entries.get(key)
        missing = entry.resident.missing(rows) if entry is not None else [rows]
        return missing[0].start if missing else None

    def unasked(self, key: ContentKey, rows: RowRange) -> list[RowRange]:
        """Returns the parts of these rows that are neither resident nor in flight."""
        entry = self._entries.get(key)
        if entry is None:
            return [rows]
        return [part for gap in entry.resident.missing(rows) for part in entry.arriving.missing(gap)]

    def is_any_arriving(self, key: ContentKey, rows: RowRange) -> bool:
        """Whether some of these rows are in flight."""
        entry = self._entries.get(key)
        return entry is not None and entry.arriving.missing(rows) != [rows]

    def has_arriving(self) -> bool:
        """Whether rows of any image are in flight."""
        return any(entry.arriving.num_rows for entry in self._entries.values())

    def can_reserve(self, num_rows: int, displacing: RowUser | None = None) -> bool:
        """Whether there is or can be room for `num_rows` more rows.

        `displacing`: also counts rows that only users behind this one need.
        """
        room = self.capacity_rows - self._num_reserved_rows
        if num_rows <= room:
            return True
        spare = sum(len(rows) for entry in self._entries.values() for rows in entry.spare(displacing))
        return num_rows <= room + spare

    def reserve(self, key: ContentKey, rows: RowRange, displacing: RowUser | None = None) -> None:
        """Makes room for rows and marks them as in flight. Call `unasked` and `can_reserve` first."""
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
        """Records the rows that a user still needs, replacing its earlier statement. They need not be resident yet."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.needed.get((user.request_id, user.image_index)) != (user, rows):
            entry.needed[user.request_id, user.image_index] = (user, rows)
            self.version += 1

    def release(self, key: ContentKey, request_id: RequestId, image_index: int) -> None:
        """Notes that a user no longer needs the image. The rows stay until they are evicted."""
        entry = self._entries.get(key)
        if entry is None or entry.needed.pop((request_id, image_index), None) is None:
            return
        self.version += 1
        if not entry.needed:
            self._entries.move_to_end(key)
        self._drop_if_forgotten(key)
        self._drop_if_empty(key)

    def arrived(self, key: ContentKey, rows: RowRange) -> bool:
        """Marks rows as resident. Returns False if they are no longer expected: the caller must drop them."""
        entry = self._entries.get(key)
        if entry is None or entry.arriving.missing(rows):
            return False
        if entry.is_forgotten and not entry.needed:
            self.drop(key, rows)
            return False
        entry.arriving.remove(rows)
        entry.resident.add(rows)
        self.version += 1
        return True

    def lose(self, key: ContentKey, rows: RowRange) -> None:
        """Takes `arrived` back, because the device could not store the rows."""
        self._evict(key, self._entries[key], rows)

    def drop(self, key: ContentKey, rows: RowRange) -> None:
        """Frees the room of rows that will not arrive."""
        entry = self._entries.get(key)
        if entry is None or entry.arriving.missing(rows):
            return
        entry.arriving.remove(rows)
        self._num_reserved_rows -= len(rows)
        self.version += 1
        self._drop_if_empty(key)

    def forget(self, forgotten: Forgotten) -> None:
        """Evicts the rows of these images at once, or when their present users release them."""
        for key in [key for key in self._entries if forgotten.includes(key.value)]:
            self._entries[key].is_forgotten = True
            self._drop_if_forgotten(key)

    def is_forgotten(self, key: ContentKey) -> bool:
        """Whether this image was removed and its rows stay only for the users that it had then."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_forgotten

    def take_evicted(self) -> tuple[tuple[ContentKey, RowRange], ...]:
        """Returns the rows evicted since the last call. The runner frees them before the same rows can arrive again."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return evicted

    def check_integrity(self) -> None:
        """Raises AssertionError if the accounting is inconsistent."""
        assert self._num_reserved_rows == sum(entry.num_rows for entry in self._entries.values()), "rows were lost"
        assert self._num_reserved_rows <= self.capacity_rows, "over the budget"
        assert all(entry.num_rows or entry.needed for entry in self._entries.values()), "an empty entry was kept"

    def num_uses(self) -> int:
        """Returns how many uses are recorded; 0 when no request is live."""
        return sum(len(entry.needed) for entry in self._entries.values())

    def _make_room(self, num_rows: int, displacing: RowUser | None) -> None:
        """Evicts only as many rows as needed. Rows in flight stay, because their room must exist when they arrive."""
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
