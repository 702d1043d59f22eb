"""Counters of the embedding store, by operation and outcome. metrics.py exports them."""

from __future__ import annotations

import enum
import threading
from collections import Counter


class StoreOperation(enum.Enum):
    """Operation on the store. The value is a metric label."""

    STAT = "stat"
    METADATA = "metadata"
    READ_ROWS = "read_rows"
    WRITE = "write"
    TOUCH = "touch"
    DELETE = "delete"
    PING = "ping"
    LEASE = "lease"


class StoreStats:
    """Counts by (operation, outcome). Thread-safe.

    An outcome is "ok" or a value of MissReason. Writes also end as "exists", when rows were there already, as
    "too_large", and as "lease_lost". The outcome "discarded" of "delete" counts removed corrupt entries. The set of
    labels is bounded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes_read = 0

    def count(self, operation: StoreOperation, outcome: str, number: int = 1) -> None:
        """Adds `number` to the count of this operation and outcome."""
        with self._lock:
            self._counts[operation.value, outcome] += number

    def add_bytes_read(self, num_bytes: int) -> None:
        """Adds bytes of values that arrived, valid or not."""
        with self._lock:
            self._bytes_read += num_bytes

    @property
    def bytes_read(self) -> int:
        """Total bytes of values that arrived so far."""
        return self._bytes_read

    def snapshot(self) -> dict[tuple[str, str], int]:
        """Returns a copy of all counts so far, by (operation, outcome)."""
        with self._lock:
            return dict(self._counts)
