"""Admission to the shared cache: stores rows only if reading them is faster than encoding again. Event loop only.

The time of writes stands for the time of reads: the same bytes over the same link. A write that was given up counts as
if it had ended then. Encoding is measured, too, so a slow link or a fast model changes the decision by itself. The time
of an encode is that of its whole forward pass, which favours storing.
"""

from __future__ import annotations

# Rows up to this size are always stored: one round trip reads them, and the fleet then encodes each image once.
ALWAYS_STORED_BYTES = 1 << 20
# Weight of the newest measurement in the running mean.
_WEIGHT = 0.2
# Number of writes before the mean is used.
_MIN_MEASUREMENTS = 3
# One in this many refused embeddings is stored all the same, to notice when the link has become faster.
_PROBE_EVERY = 16


class StoreAdmission:
    """The decision of one process. Admits everything until it has measured a few writes."""

    def __init__(self) -> None:
        self._s_per_byte = 0.0
        self._num_measurements = 0
        self._num_refused = 0

    @property
    def s_per_byte(self) -> float:
        """Running mean of the time to write one byte, seconds; 0 before the first measurement."""
        return self._s_per_byte

    def note_write(self, num_bytes: int, duration_s: float) -> None:
        """Records the duration of a write. Small writes are ignored: they do not show a link's speed."""
        if num_bytes <= ALWAYS_STORED_BYTES:
            return
        s_per_byte = duration_s / num_bytes
        weight = _WEIGHT if self._num_measurements else 1.0
        self._s_per_byte += weight * (s_per_byte - self._s_per_byte)
        self._num_measurements += 1

    def admit(self, num_bytes: int, encode_s: float) -> bool:
        """Returns whether to store rows that took `encode_s` seconds to encode."""
        if num_bytes <= ALWAYS_STORED_BYTES or self._num_measurements < _MIN_MEASUREMENTS:
            return True
        if num_bytes * self._s_per_byte <= encode_s:
            return True
        self._num_refused += 1
        return self._num_refused % _PROBE_EVERY == 0
