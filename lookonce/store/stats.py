"""Counters of the embedding store: how each operation ended. Services export them; nothing here knows how."""

from __future__ import annotations

import enum
import threading
from collections import Counter


class StoreOperation(enum.Enum):
    """The value is a metric label."""

    STAT = "stat"
    METADATA = "metadata"
    READ_ROWS = "read_rows"
    WRITE = "write"
    TOUCH = "touch"
    DELETE = "delete"
    PING = "ping"
    LEASE = "lease"


class StoreStats:
    """Thread-safe counts by (operation, outcome).

    An outcome is "ok", a value of MissReason, or for writes "exists" (somebody else's rows are there) and "too_large";
    for operation "delete", "discarded" counts the corrupt entries that were removed. The set of labels is bounded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes_read = 0

    def count(self, operation: StoreOperation, outcome: str) -> None:
        """Adds one."""
        with self._lock:
            self._counts[operation.value, outcome] += 1

    def add_bytes_read(self, num_bytes: int) -> None:
        """Adds bytes of values that arrived, whatever became of them."""
        with self._lock:
            self._bytes_read += num_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes of values that arrived so far."""
        return self._bytes_read

    def snapshot(self) -> dict[tuple[str, str], int]:
        """All counts so far, by (operation, outcome)."""
        with self._lock:
            return dict(self._counts)
