"""Reads the size of AV1 pictures from their sequence headers (AV1 specification, 5.3 to 5.5).

libavif scales a picture to the size that the file claims. Without this check, a file that claims a few pixels could
have any number decoded.
"""

from __future__ import annotations

from collections.abc import Iterator

from lookonce.errors import ImageUndecodableError
from lookonce.media.boxes import broken

_SEQUENCE_HEADER = 1
# Further bits of a level above 7 say its tier.
_MAX_LEVEL_WITHOUT_TIER = 7
_MAX_LENGTH_BYTES = 8


class _Bits:
    """Reads numbers of any number of bits, the most significant bit first."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "big")
        self._num_left = 8 * len(data)

    def number(self, num_bits: int) -> int:
        self._num_left -= num_bits
        if self._num_left < 0:
            raise broken()
        return self._value >> self._num_left & (1 << num_bits) - 1

    def skip_variable(self) -> None:
        """Skips a number that begins with as many zeros as it has bits."""
        num_zeros = 0
        while not self.number(1):
            num_zeros += 1
        self.number(num_zeros)


def check_av1_size(data: bytes, size: tuple[int, int]) -> None:
    """Raises ImageUndecodableError unless every sequence header of a coded picture has this size."""
    if any(_size(header) != size for header in _sequence_headers(data)):
        raise ImageUndecodableError("the image has another size than its header says; its pixels cannot be decoded")


def _sequence_headers(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        first = data[position]
        position += 2 if first & 4 else 1
        size = len(data) - position
        if first & 2:
            size, position = _length(data, position)
        if size < 0 or position + size > len(data):
            raise broken()
        if first >> 3 & 15 == _SEQUENCE_HEADER:
            # The size is within the first bytes, behind 32 operating points at most.
            yield data[position : position + min(size, 1024)]
        position += size


def _length(data: bytes, position: int) -> tuple[int, int]:
    """A length of 7 bits per byte, the least significant first, and the position behind it."""
    length = 0
    for index, byte in enumerate(data[position : position + _MAX_LENGTH_BYTES]):
        length |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            return length, position + index + 1
    raise broken()


def _size(header: bytes) -> tuple[int, int]:
    bits = _Bits(header)
    # Profile, and whether the sequence is a still picture.
    bits.number(4)
    if bits.number(1):
        bits.number(5)
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits.number(4) + 1, bits.number(4) + 1
    return bits.number(width_bits) + 1, bits.number(height_bits) + 1


def _skip_operating_points(bits: _Bits) -> None:
    delay_bits = 0
    if bits.number(1):
        # Units of a tick and of a second.
        bits.number(64)
        if bits.number(1):
            bits.skip_variable()
        if bits.number(1):
            delay_bits = bits.number(5) + 1
            bits.number(42)
    has_display_delay = bits.number(1)
    for _ in range(bits.number(5) + 1):
        bits.number(12)
        if bits.number(5) > _MAX_LEVEL_WITHOUT_TIER:
            bits.number(1)
        if delay_bits and bits.number(1):
            bits.number(2 * delay_bits + 1)
        if has_display_delay and bits.number(1):
            bits.number(4)
