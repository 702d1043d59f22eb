"""Limits the metadata of an image file by its outermost structure, before Pillow reads the file.

Pillow makes an object of every block that it meets on the way to the pixels: 20 MB of empty JPEG segments took 707 MB
and 10 s (Pillow 13, 2026-11-21), in a process that has requests to answer. This module only counts blocks and bytes;
Pillow checks their content and whether the structure is valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lookonce.errors import ImageDecodeLimitError

# A photo has a few dozen blocks with some hundred kilobytes in all, or some megabytes with depth maps.
_MAX_BLOCKS = 10_000
_MAX_BYTES = 8 << 20
# Pillow makes objects of every number in EXIF: 8 MB of one tag of fractions take 240 MB and seconds. A camera writes
# one JPEG segment, 64 KiB at most.
MAX_EXIF_BYTES = 128 << 10

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS = frozenset({b"IDAT", b"fdAT"})
# Beginnings of PNG blocks, name and content, that can hold an orientation.
_PNG_ORIENTATIONS = (
    b"eXIf",
    b"iTXtXML:com.adobe.xmp\0",
    *(name + b"Raw profile type exif\0" for name in (b"tEXt", b"zTXt", b"iTXt")),
)
_JPEG_FILL, _JPEG_START_OF_SCAN, _JPEG_APP1 = 0xFF, 0xDA, 0xE1
# Markers without a length: RST0 … EOI, and those that Pillow skips.
_JPEG_LONE = frozenset({0x00, *range(0x01, 0xC0), 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
_WEBP_PIXELS = frozenset({b"VP8 ", b"VP8L", b"ALPH", b"ANMF"})
_GIF_EXTENSION, _GIF_PIXELS, _GIF_END = 0x21, 0x2C, 0x3B


class _Block(NamedTuple):
    num_bytes: int
    is_exif: bool = False


def check_metadata(data: bytes) -> None:
    """Raises ImageDecodeLimitError for a file with too much metadata. Accepts all others, also broken ones."""
    num_bytes = num_exif_bytes = 0
    for number, block in enumerate(_blocks(data), 1):
        num_bytes += block.num_bytes
        num_exif_bytes += block.num_bytes if block.is_exif else 0
        if number > _MAX_BLOCKS or num_bytes > _MAX_BYTES:
            raise ImageDecodeLimitError(
                f"the image file holds more than {_MAX_BLOCKS} blocks or {_MAX_BYTES} bytes of metadata; "
                "save it without metadata"
            )
    check_exif(num_exif_bytes)


def with_orientation_first(data: bytes) -> bytes:
    """Returns a PNG with the blocks that can hold an orientation before its pixels; any other file as it is.

    PNG allows them behind the pixels, where Pillow finds them only when it has decoded the image. Raises
    ImageDecodeLimitError for a PNG with such a block and too many others.
    """
    if not data.startswith(_PNG_SIGNATURE):
        return data
    pixels = data.find(b"IDAT", len(_PNG_SIGNATURE)) - 4
    if pixels < 0 or all(data.find(beginning, pixels) < 0 for beginning in _PNG_ORIENTATIONS):
        return data
    late: list[bytes] = []
    rest: list[bytes] = []
    position = pixels
    for _ in range(_MAX_BLOCKS):
        if position >= len(data):
            return b"".join((data[:pixels], *late, *rest))
        end = position + 12 + int.from_bytes(data[position : position + 4], "big")
        (late if data.startswith(_PNG_ORIENTATIONS, position + 4) else rest).append(data[position:end])
        position = end
    raise ImageDecodeLimitError(f"the image file holds more than {_MAX_BLOCKS} blocks; save it without metadata")


def check_exif(num_bytes: int) -> None:
    """Raises ImageDecodeLimitError for more bytes of EXIF than the limit."""
    if num_bytes > MAX_EXIF_BYTES:
        raise ImageDecodeLimitError(
            f"the image file holds more than {MAX_EXIF_BYTES} bytes of EXIF; save it without EXIF"
        )


def _blocks(data: bytes) -> Iterator[_Block]:
    """Yields the metadata blocks with their sizes; a size is cut to the bytes that the file has left."""
    if data.startswith(_PNG_SIGNATURE):
        return _png_blocks(data)
    if data.startswith(b"\xff\xd8"):
        return _jpeg_blocks(data)
    if data.startswith(b"GIF8"):
        return _gif_blocks(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp_blocks(data)
    return iter(())


def _png_blocks(data: bytes) -> Iterator[_Block]:
    """Yields the blocks before the pixels. Only the decoding process reads those behind."""
    position = len(_PNG_SIGNATURE)
    while position < len(data) and data[position + 4 : position + 8] not in _PNG_PIXELS:
        size = int.from_bytes(data[position : position + 4], "big")
        yield _Block(min(size, len(data) - position), data[position + 4 : position + 8] == b"eXIf")
        # Length, name and checksum.
        position += 12 + size


def _jpeg_blocks(data: bytes) -> Iterator[_Block]:
    """Yields the segments before the first scan. A byte outside of segments counts, since Pillow reads each alone."""
    position = 2
    while position + 1 < len(data):
        is_marker, marker = data[position] == _JPEG_FILL, data[position + 1]
        if not is_marker or marker == _JPEG_FILL:
            yield _Block(1)
            position += 1
        elif marker == _JPEG_START_OF_SCAN:
            return
        elif marker in _JPEG_LONE:
            yield _Block(2)
            position += 2
        else:
            size = max(2, int.from_bytes(data[position + 2 : position + 4], "big"))
            is_exif = marker == _JPEG_APP1 and data[position + 4 : position + 8] == b"Exif"
            yield _Block(min(size, len(data) - position), is_exif)
            position += 2 + size


def _gif_blocks(data: bytes) -> Iterator[_Block]:
    """Yields the blocks before the first frame; each sub-block of an extension counts."""
    palette_bits = (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0
    position = 13 + (3 << palette_bits if palette_bits else 0)
    while position < len(data) and data[position] not in (_GIF_PIXELS, _GIF_END):
        yield _Block(1)
        is_extension = data[position] == _GIF_EXTENSION
        position += 1
        if is_extension:
            position += 1
            while position < len(data) and data[position]:
                yield _Block(data[position])
                position += 1 + data[position]
            position += 1


def _webp_blocks(data: bytes) -> Iterator[_Block]:
    """Yields the blocks of the whole file: metadata come last, and Pillow lists all frames when it opens a file."""
    position = 12
    while position < len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        name = data[position : position + 4]
        num_bytes = 0 if name in _WEBP_PIXELS else min(size, len(data) - position)
        yield _Block(num_bytes, is_exif=name == b"EXIF")
        # Name, length, and a byte of padding behind an odd length.
        position += 8 + size + size % 2
