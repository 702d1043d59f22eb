"""Draws pictures that no other run has, as small PNG files. Needs no library."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass

# Coloured fields of a picture, along each side.
_FIELDS = 8


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture that is drawn when a request needs it: the same file each time."""

    seed: int
    size_px: int

    def png(self) -> bytes:
        """Returns the file. Takes milliseconds, and a second for the largest pictures: keep it off event loops."""
        return draw_picture(random.Random(self.seed), self.size_px)


def draw_picture(numbers: random.Random, size_px: int) -> bytes:
    """Returns a PNG file of random coloured fields, `size_px` wide and high."""
    colours = [[numbers.randbytes(3) for _ in range(_FIELDS)] for _ in range(_FIELDS)]
    field_of = [position * _FIELDS // size_px for position in range(size_px)]
    # Each line begins with its filter: none.
    lines = [b"\0" + b"".join(row[field] for field in field_of) for row in colours]
    pixels = b"".join(lines[field] for field in field_of)
    # 8 bits for each of red, green and blue.
    header = struct.pack(">IIBBBBB", size_px, size_px, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(pixels)) + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
