"""Finds PNG files that end before their last row, which Pillow accepts if the end lies between two rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import PIL.Image

from lookonce.errors import ImageUndecodableError

_FIRST_CHUNK = 8
# Samples per pixel by colour type.
_NUM_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# First column, first row, column step and row step of each pass over an interlaced file.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_UNPACKED_BYTES = 1 << 20


def check_rows(image: PIL.Image.Image, data: bytes) -> None:
    """Raises ImageUndecodableError if the file of a decoded PNG holds fewer rows than the image has.

    Pillow leaves pixels that it does not decode at zero. The rows are counted if the last row is zero or the file is
    interlaced.
    """
    header, chunks = _pixel_chunks(data)
    is_interlaced = bool(header[12])
    last_row = image.crop((0, image.height - 1, image.width, image.height))
    if not is_interlaced and any(last_row.tobytes()):
        return
    if _num_unpacked(chunks, num_needed := _num_row_bytes(header, image.size)) < num_needed:
        raise ImageUndecodableError("the image is broken or truncated; its pixels cannot be decoded")


def _pixel_chunks(data: bytes) -> tuple[bytes, list[memoryview]]:
    """The header, and the contents of the first run of chunks with pixels, which are those of the first frame."""
    header = b""
    contents: list[memoryview] = []
    for name, content in _chunks(data):
        if name == b"IHDR":
            header = bytes(content)
        elif name == b"IDAT":
            contents.append(content)
        elif contents:
            break
    return header, contents


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    view = memoryview(data)
    position = _FIRST_CHUNK
    while position < len(data):
        start = position + 8
        size = int.from_bytes(data[position : position + 4], "big")
        yield data[position + 4 : start], view[start : start + size]
        # The checksum has 4 bytes.
        position = start + size + 4


def _num_row_bytes(header: bytes, size: tuple[int, int]) -> int:
    """Size of all decompressed rows, filter bytes included."""
    width, height = size
    pixel_bits = header[8] * _NUM_SAMPLES[header[9]]
    passes = _PASSES if header[12] else ((0, 0, 1, 1),)
    total = 0
    for column, row, column_step, row_step in passes:
        num_columns, num_rows = -((column - width) // column_step), -((row - height) // row_step)
        if num_columns > 0:
            total += max(0, num_rows) * (1 + (num_columns * pixel_bits + 7) // 8)
    return total


def _num_unpacked(chunks: list[memoryview], num_needed: int) -> int:
    """Bytes that the chunks unpack to; not counted further than `num_needed`."""
    unpacker = zlib.decompressobj()
    num_bytes = 0
    for chunk in chunks:
        rest = bytes(chunk)
        while rest and num_bytes < num_needed:
            num_bytes += len(unpacker.decompress(rest, _UNPACKED_BYTES))
            rest = unpacker.unconsumed_tail
    return num_bytes
