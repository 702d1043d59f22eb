"""Rows of recently used images in this process, bounded by bytes. Event-loop only.

Two segments, each least recently used out first (segmented LRU; Karedla, Love and Wherry, 1994): an entry is new until
it is asked for again, then it is hot. New ones make room first, so that images shown once do not push out those shown
often; hot ones have at most four fifths of the room and become new again when there are more.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from lookonce.embedding_meta import EmbeddingMeta

_HOT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class LocalEmbedding:
    """All rows of one image."""

    meta: EmbeddingMeta
    # meta.size_bytes raw bytes, read-only.
    rows: memoryview = field(repr=False)
    # What the model took for them, seconds; infinity where that is not known.
    encode_s: float = math.inf


class _Segment:
    """Least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, LocalEmbedding] = OrderedDict()
        self.num_bytes = 0

    def add(self, key: bytes, entry: LocalEmbedding) -> None:
        self.entries[key] = entry
        self.num_bytes += entry.rows.nbytes

    def take(self, key: bytes) -> LocalEmbedding | None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.rows.nbytes
        return entry

    def take_oldest(self) -> tuple[bytes, LocalEmbedding]:
        key = next(iter(self.entries))
        entry = self.entries.pop(key)
        self.num_bytes -= entry.rows.nbytes
        return key, entry


class LocalCache:
    """Cache key → rows."""

    def __init__(self, capacity_bytes: int) -> None:
        """A capacity of 0 keeps nothing."""
        self.capacity_bytes = capacity_bytes
        # Entries that had to make room, since the start.
        self.num_evictions = 0
        self._new = _Segment()
        self._hot = _Segment()

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that are kept."""
        return self._new.num_bytes + self._hot.num_bytes

    def __len__(self) -> int:
        return len(self._new.entries) + len(self._hot.entries)

    def __contains__(self, key: object) -> bool:
        return key in self._new.entries or key in self._hot.entries

    def get(self, key: bytes) -> LocalEmbedding | None:
        """The entry, which is hot from now on and the most recently used one."""
        entry = self._hot.take(key) or self._new.take(key)
        if entry is not None:
            self._hot.add(key, entry)
            self._cool_down()
        return entry

    def put(self, key: bytes, entry: LocalEmbedding) -> None:
        """Keeps an entry and drops others until all fit; one over the capacity is not kept."""
        self.remove(key)
        if entry.rows.nbytes > self.capacity_bytes:
            return
        # Room first: the entry itself must not be what makes it, since somebody is about to read it.
        while self.num_bytes + entry.rows.nbytes > self.capacity_bytes:
            (self._new if self._new.entries else self._hot).take_oldest()
            self.num_evictions += 1
        self._new.add(key, entry)

    def keys_where(self, condition: Callable[[bytes], bool]) -> list[bytes]:
        """The keys of entries that are meant."""
        return [key for segment in (self._new, self._hot) for key in segment.entries if condition(key)]

    def remove(self, key: bytes) -> None:
        """Drops an entry if it is there."""
        if self._new.take(key) is None:
            self._hot.take(key)

    def _cool_down(self) -> None:
        """The one that was just asked for stays hot, however large it is."""
        while self._hot.num_bytes > _HOT_SHARE * self.capacity_bytes and len(self._hot.entries) > 1:
            self._new.add(*self._hot.take_oldest())
