"""Rows of recently used images in this process, bounded by bytes, least recently used out first. Event-loop only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from lookonce.embedding_meta import EmbeddingMeta


@dataclass(frozen=True, slots=True)
class LocalEmbedding:
    """All rows of one image."""

    meta: EmbeddingMeta
    # meta.size_bytes raw bytes, read-only.
    rows: memoryview = field(repr=False)


class LocalCache:
    """Cache key → rows."""

    def __init__(self, capacity_bytes: int) -> None:
        """A capacity of 0 keeps nothing."""
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, LocalEmbedding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> LocalEmbedding | None:
        """The entry, which becomes the most recently used one."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, entry: LocalEmbedding) -> None:
        """Keeps an entry and drops the least recently used ones until all fit; one over the capacity is not kept."""
        self.remove(key)
        if entry.rows.nbytes > self.capacity_bytes:
            return
        self._entries[key] = entry
        self.num_bytes += entry.rows.nbytes
        while self.num_bytes > self.capacity_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= dropped.rows.nbytes

    def remove(self, key: bytes) -> None:
        """Drops an entry if it is there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.rows.nbytes
