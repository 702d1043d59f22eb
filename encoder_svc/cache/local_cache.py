"""Rows of recently used images in this process, bounded by bytes. Event loop only.

Two segments, each of which evicts its least recently used entry first (segmented LRU; Karedla, Love and Wherry, 1994).
An entry is new until it is asked for again, then it is hot. New entries are evicted before hot ones, so that images
shown once do not push out those shown often. Hot entries take at most four fifths of the capacity; beyond that the
oldest of them become new again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from lookonce.embedding_meta import EmbeddingMeta
from lookonce.forgotten import Forgotten

_HOT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class LocalEmbedding:
    """All rows of one image."""

    meta: EmbeddingMeta
    # meta.size_bytes raw bytes, read-only.
    rows: memoryview = field(repr=False)
    # Duration of the forward pass that made them, seconds; infinity where it is not known.
    encode_s: float = math.inf


class _Segment:
    """Entries in the order of their last use, and their size."""

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
    """A segmented LRU cache from ContentKey.value to rows."""

    def __init__(self, capacity_bytes: int) -> None:
        """A capacity of 0 keeps nothing."""
        self.capacity_bytes = capacity_bytes
        # Entries evicted for others since the start.
        self.num_evictions = 0
        # Calls of `forget` since the start; read from threads, too.
        self.num_forgets = 0
        self._new = _Segment()
        self._hot = _Segment()

    @property
    def num_bytes(self) -> int:
        """Size of all rows that are kept."""
        return self._new.num_bytes + self._hot.num_bytes

    def __len__(self) -> int:
        return len(self._new.entries) + len(self._hot.entries)

    def __contains__(self, key: object) -> bool:
        return key in self._new.entries or key in self._hot.entries

    def get(self, key: bytes) -> LocalEmbedding | None:
        """Returns an entry and makes it the most recently used of the hot ones; None if there is none."""
        entry = self._hot.take(key) or self._new.take(key)
        if entry is not None:
            self._hot.add(key, entry)
            self._cool_down()
        return entry

    def put(self, key: bytes, entry: LocalEmbedding) -> None:
        """Keeps an entry and evicts others until all fit; an entry over the capacity is not kept."""
        self.remove(key)
        if entry.rows.nbytes > self.capacity_bytes:
            return
        # Before the entry is added, so that it is not evicted itself: somebody is about to read it.
        while self.num_bytes + entry.rows.nbytes > self.capacity_bytes:
            (self._new if self._new.entries else self._hot).take_oldest()
            self.num_evictions += 1
        self._new.add(key, entry)

    def forget(self, forgotten: Forgotten) -> None:
        """Drops the entries of images that were removed from all caches."""
        self.num_forgets += 1
        for segment in (self._new, self._hot):
            entries = segment.entries.items()
            for key in [key for key, entry in entries if forgotten.includes(key, entry.meta.file_tags)]:
                segment.take(key)

    def remove(self, key: bytes) -> None:
        """Drops one entry if it exists."""
        if self._new.take(key) is None:
            self._hot.take(key)

    def _cool_down(self) -> None:
        """Moves hot entries to the new ones until the hot segment fits; the last used entry stays hot at any size."""
        while self._hot.num_bytes > _HOT_SHARE * self.capacity_bytes and len(self._hot.entries) > 1:
            self._new.add(*self._hot.take_oldest())
