"""Reads boxes, the building blocks of HEIC, AVIF and MP4 files (ISO/IEC 14496-12), and checks every length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lookonce.errors import ImageDecodeLimitError, ImageUndecodableError

# A phone's picture has some hundred entries in each list, most of them tiles. libheif accepts 1000 items.
MAX_ENTRIES = 2000
_HEADER_BYTES = 8
_LONG_HEADER_BYTES = 16


class Box(NamedTuple):
    """One box: its kind and the place of its content in the file."""

    kind: bytes
    start: int
    end: int


class Reader:
    """Reads numbers of any size from a part of a file, the most significant byte first."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        self._data = data
        self.position = start
        self.end = end

    def number(self, num_bytes: int) -> int:
        """Reads the next number; 0 for one of no bytes."""
        return int.from_bytes(self.take(num_bytes), "big")

    def signed(self, num_bytes: int) -> int:
        """Reads the next number, which may be negative."""
        return int.from_bytes(self.take(num_bytes), "big", signed=True)

    def take(self, num_bytes: int) -> bytes:
        """Reads the next bytes. Raises ImageUndecodableError if there are fewer."""
        start = self.position
        if num_bytes > self.end - start:
            raise broken()
        self.position += num_bytes
        return self._data[start : self.position]

    def version(self) -> tuple[int, int]:
        """Version and flags, with which many boxes begin."""
        return self.number(1), self.number(3)

    def count(self, num_bytes: int) -> int:
        """Reads the next number, a count of entries. Raises ImageDecodeLimitError if no real picture has so many."""
        number = self.number(num_bytes)
        check_entries(number)
        return number


def boxes(data: bytes, start: int, end: int) -> Iterator[Box]:
    """Yields the boxes of a part of a file.

    Raises ImageUndecodableError for a box that is longer than the part; the last box of a truncated file is one.
    """
    number = 0
    while start < end:
        number += 1
        check_entries(number)
        reader = Reader(data, start, end)
        size, kind = reader.number(4), reader.take(4)
        header_bytes = _HEADER_BYTES
        if size == 1:
            size, header_bytes = reader.number(8), _LONG_HEADER_BYTES
        elif size == 0:
            # The box ends with the file.
            size = end - start
        if not header_bytes <= size <= end - start:
            raise broken()
        yield Box(kind, start + header_bytes, start + size)
        start += size


def box(kind: bytes, content: bytes) -> bytes:
    """Returns the bytes of a box."""
    return (len(content) + _HEADER_BYTES).to_bytes(4, "big") + kind + content


def full_box(kind: bytes, content: bytes, version: int = 0) -> bytes:
    """Returns the bytes of a box that begins with a version and flags, which are 0."""
    return box(kind, bytes((version, 0, 0, 0)) + content)


def check_entries(number: int) -> None:
    """Raises ImageDecodeLimitError for a list of more entries than any picture has."""
    if number > MAX_ENTRIES:
        raise ImageDecodeLimitError(
            f"the image file has a list of more than {MAX_ENTRIES} entries; save the image without metadata"
        )


def broken() -> ImageUndecodableError:
    """The error for a file whose structure cannot be read, or that lacks its end."""
    return ImageUndecodableError("the image is broken or truncated; its pixels cannot be decoded")
