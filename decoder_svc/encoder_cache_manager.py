"""Accounting of the embedding rows on the device: what is there, on its way, needed, and what may go. No tensors.

Entries are keyed by content key and shared by all requests. An entry is *held* by running requests that have yet to
compute some of its tokens, and *wanted* by waiting ones. Held entries stay; wanted ones give way to running requests
only, so that a running request can always make progress; all others leave in the order in which they were released.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from decoder_svc.request import RequestId, RowSource
from lookonce.content_key import ContentKey


@dataclass(slots=True)
class _Entry:
    num_rows: int
    # None while the rows are on their way.
    source: RowSource | None = None
    held_by: set[RequestId] = field(default_factory=set)
    wanted_by: set[RequestId] = field(default_factory=set)


class EncoderCacheManager:
    """Budgeted in embedding rows. Only `reserve` evicts; every `can_…` and `is_…` is a pure question."""

    def __init__(self, num_rows: int) -> None:
        self.capacity_rows = num_rows
        self._num_reserved_rows = 0
        # Oldest release first.
        self._entries: OrderedDict[ContentKey, _Entry] = OrderedDict()
        self._evicted: list[ContentKey] = []

    @property
    def num_reserved_rows(self) -> int:
        """Rows that are resident or on their way."""
        return self._num_reserved_rows

    def is_known(self, key: ContentKey) -> bool:
        """Whether the rows are resident or on their way."""
        return key in self._entries

    def is_resident(self, key: ContentKey) -> bool:
        """Whether the rows can be used in this step."""
        entry = self._entries.get(key)
        return entry is not None and entry.source is not None

    def source(self, key: ContentKey) -> RowSource | None:
        """Where resident rows came from; None when they are not resident."""
        entry = self._entries.get(key)
        return entry.source if entry is not None else None

    def can_reserve(self, num_rows: int, *, for_running: bool) -> bool:
        """Whether room for `num_rows` can be made; a waiting request displaces nobody's rows."""
        evictable = sum(entry.num_rows for entry in self._entries.values() if self._may_evict(entry, for_running))
        return self._num_reserved_rows - evictable + num_rows <= self.capacity_rows

    def reserve(self, key: ContentKey, num_rows: int, *, for_running: bool) -> None:
        """Makes room and notes that the rows are on their way. The caller has asked `can_reserve`."""
        assert key not in self._entries, "rows were reserved twice"
        for candidate, entry in list(self._entries.items()):
            if self._num_reserved_rows + num_rows <= self.capacity_rows:
                break
            if self._may_evict(entry, for_running):
                self._remove(candidate)
        assert self._num_reserved_rows + num_rows <= self.capacity_rows, "reserve() without asking can_reserve()"
        self._entries[key] = _Entry(num_rows)
        self._num_reserved_rows += num_rows

    def use(self, key: ContentKey, request_id: RequestId, *, running: bool) -> None:
        """Notes that a request needs the entry: held if it runs, wanted if it waits."""
        entry = self._entries[key]
        (entry.held_by if running else entry.wanted_by).add(request_id)
        if running:
            entry.wanted_by.discard(request_id)

    def release(self, key: ContentKey, request_id: RequestId) -> None:
        """The request needs the entry no more; the rows stay until their room is needed."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.held_by.discard(request_id)
        entry.wanted_by.discard(request_id)
        if not entry.held_by and not entry.wanted_by:
            self._entries.move_to_end(key)

    def arrived(self, key: ContentKey, source: RowSource) -> bool:
        """The rows are on the device. False when their room was given away meanwhile: the rows must be dropped."""
        entry = self._entries.get(key)
        if entry is None or entry.source is not None:
            return False
        entry.source = source
        return True

    def drop(self, key: ContentKey) -> None:
        """Forgets rows that will not arrive."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_reserved_rows -= entry.num_rows

    def take_evicted(self) -> tuple[ContentKey, ...]:
        """Resident keys evicted since the last call and not reserved again; the runner frees their tensors."""
        evicted = tuple(key for key in self._evicted if not self.is_resident(key))
        self._evicted.clear()
        return evicted

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounting is off."""
        assert self._num_reserved_rows == sum(entry.num_rows for entry in self._entries.values()), "rows were lost"
        assert self._num_reserved_rows <= self.capacity_rows, "over the budget"

    def num_uses(self) -> int:
        """Holds and wants of live requests; 0 when idle."""
        return sum(len(entry.held_by) + len(entry.wanted_by) for entry in self._entries.values())

    def _may_evict(self, entry: _Entry, for_running: bool) -> bool:
        """Rows on their way stay: their fetch cannot be undone, and its answer must find them."""
        if entry.held_by or entry.source is None:
            return False
        return for_running or not entry.wanted_by

    def _remove(self, key: ContentKey) -> None:
        entry = self._entries.pop(key)
        self._num_reserved_rows -= entry.num_rows
        self._evicted.append(key)
