"""Which rows are worth a place in the shared cache: those that are read sooner than made again. Event-loop only.

What a write takes stands for what a read will take: the same bytes over the same link; one that was given up counts as
if it had ended then. Both sides are measured as they happen, so a slow link or a fast model changes the answer by
itself. What the model took is that of the whole pass: in doubt rows are stored.
"""

from __future__ import annotations

# Rows of at most so many bytes are always stored: one round trip brings them, and each is encoded once in the fleet.
ALWAYS_STORED_BYTES = 1 << 20
# Share of the newest measurement in the running mean.
_WEIGHT = 0.2
# Writes before the mean is believed.
_MIN_MEASUREMENTS = 3
# One in so many of those that are not worth it is stored all the same: the link may have become faster.
_PROBE_EVERY = 16


class StoreAdmission:
    """Of one process. Stores everything until it has measured."""

    def __init__(self) -> None:
        self._s_per_byte = 0.0
        self._num_measurements = 0
        self._num_refused = 0

    @property
    def s_per_byte(self) -> float:
        """Running mean of what a byte takes to the shared cache, seconds; 0 before the first measurement."""
        return self._s_per_byte

    def note_write(self, num_bytes: int, duration_s: float) -> None:
        """So many bytes took so long. Small ones say nothing about a link's speed and are not counted."""
        if num_bytes <= ALWAYS_STORED_BYTES:
            return
        s_per_byte = duration_s / num_bytes
        weight = _WEIGHT if self._num_measurements else 1.0
        self._s_per_byte += weight * (s_per_byte - self._s_per_byte)
        self._num_measurements += 1

    def admit(self, num_bytes: int, encode_s: float) -> bool:
        """Decides about rows that took the model `encode_s` seconds: whether to store them."""
        if num_bytes <= ALWAYS_STORED_BYTES or self._num_measurements < _MIN_MEASUREMENTS:
            return True
        if num_bytes * self._s_per_byte <= encode_s:
            return True
        self._num_refused += 1
        return self._num_refused % _PROBE_EVERY == 0
