"""Image files that are small and ask for much: pixels, passes, blocks, texts, or a decoder's patience."""

from __future__ import annotations

import functools
import random
import struct
import zlib
from collections.abc import Iterable

import PIL.Image

from tests import heif_files, image_files

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Length of the signature and IHDR of a PNG.
_HEAD_BYTES = 33


def png_of_180_megapixels() -> bytes:
    """Returns a grey PNG of 520 kB with very many pixels."""
    return png_of_rows(13_300, 13_400, 2, bytes(1 + 3 * 13_300))


def png_of_rows(
    width: int, height: int, colour_type: int, row: bytes, *, bit_depth: int = 8, chunk: int = 1 << 20
) -> bytes:
    """A PNG whose rows (with their filter byte) are all equal, in IDAT chunks of so many bytes."""
    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    packed = _packed(row, height)
    pieces = [packed[start : start + chunk] for start in range(0, len(packed), chunk)]
    return (
        _SIGNATURE + _chunk(b"IHDR", header) + b"".join(_chunk(b"IDAT", one) for one in pieces) + _chunk(b"IEND", b"")
    )


def png_of_many_pieces(num_pieces: int) -> bytes:
    """Good pixels in chunks of one byte or none: each costs the decoder a round of its loop."""
    good = _good_png()
    pixels, end = good.index(b"IDAT") - 4, good.index(b"IEND") - 4
    data = good[pixels + 8 : end - 4]
    pieces = [_chunk(b"IDAT", bytes([one])) for one in data[:-1]]
    empty = _chunk(b"IDAT", b"") * (num_pieces - len(data))
    return good[:pixels] + b"".join(pieces) + empty + _chunk(b"IDAT", data[-1:]) + good[end:]


@functools.cache
def _packed_zeros(num_bytes: int) -> bytes:
    """Compressed zeros. Two bombs unpack to the same gigabyte."""
    return _packed(bytes(1), num_bytes)


def _packed(part: bytes, count: int) -> bytes:
    """Compresses equal parts. Only about a megabyte goes to zlib, which takes seconds for a gigabyte."""
    num_in_block = max(1, min(count, (1 << 20) // len(part)))
    block, rest = part * num_in_block, part * (count % num_in_block)
    packer = zlib.compressobj(9)
    # A full flush makes the bytes after it independent of those before. The checksum at the end covers all of them.
    first = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    following = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    end = packer.compress(rest) + packer.flush()
    checksum = 1
    for _ in range(count // num_in_block):
        checksum = zlib.adler32(block, checksum)
    checksum = zlib.adler32(rest, checksum)
    return first + following * (count // num_in_block - 1) + end[:-4] + checksum.to_bytes(4, "big")


def png_with_text(num_texts: int, text_bytes: int) -> bytes:
    """Compressed texts under different names."""
    packed = _packed_zeros(text_bytes)
    return _png_with(_chunk(b"zTXt", b"name %d\0\0" % number + packed) for number in range(num_texts))


def png_with_colour_profile(profile_bytes: int) -> bytes:
    """A compressed profile of zeros."""
    return _png_with([_chunk(b"iCCP", b"name\0\0" + _packed_zeros(profile_bytes))])


def png_with_exif(exif: bytes) -> bytes:
    """A small picture with an EXIF block."""
    return _png_with([_chunk(b"eXIf", exif)])


def png_of_blocks(num_bytes: int) -> bytes:
    """Returns a PNG with very many empty private chunks."""
    empty = _chunk(b"aaAa", b"")
    return _png_with([empty * (num_bytes // len(empty))])


def jpeg_of_blocks(num_bytes: int) -> bytes:
    """Returns a JPEG with very many empty application segments."""
    good = image_files.encoded(image_files.noise(1, 90, 40), "JPEG")
    return good[:2] + b"\xff\xe1\x00\x02" * (num_bytes // 4) + good[2:]


def jpeg_of_fill_bytes(num_bytes: int) -> bytes:
    """Padding before a marker, which the format allows in any length."""
    good = image_files.encoded(image_files.noise(1, 90, 40), "JPEG")
    return good[:2] + b"\xff" * num_bytes + good[2:]


def gif_of_blocks(num_bytes: int) -> bytes:
    """A comment in blocks of one byte."""
    good = image_files.encoded(image_files.noise(1, 90, 40), "GIF")
    colours = 13 + 3 * 2 ** ((good[10] & 7) + 1)
    return good[:colours] + b"!\xfe" + b"\x01a" * (num_bytes // 2) + b"\x00" + good[colours:]


def gif_with_a_frame_beyond_its_screen() -> bytes:
    """The screen is small, the frame in it is not."""
    screen = struct.pack("<6sHHBBB", b"GIF89a", 8, 8, 0x80, 0, 0) + bytes(6)
    return screen + struct.pack("<BHHHHBB", 0x2C, 0, 0, 65_535, 65_535, 0, 2) + b"\x02\x44\x01\x00\x3b"


def webp_of_blocks(num_bytes: int) -> bytes:
    """Empty chunks behind the pixels, where metadata belong."""
    good = image_files.encoded(image_files.noise(1, 90, 40), "WEBP", exif=exif_of(1))
    body = good[12:] + b"aaaa\0\0\0\0" * (num_bytes // 8)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def avif_that_claims_few_pixels() -> bytes:
    """16 megapixels of one colour in a file that says 64 × 64."""
    large = image_files.encoded(PIL.Image.new("RGB", (4000, 4000)), "AVIF", speed=10)
    return heif_files.heif([heif_files.coded_item(large, b"av01", claimed=(64, 64))])


def avif_of_blocks(num_bytes: int) -> bytes:
    """Empty boxes before the structure."""
    good = image_files.encoded(image_files.noise(1, 90, 40), "AVIF")
    start = good.index(b"meta") - 4
    return good[:start] + b"\0\0\0\x08free" * (num_bytes // 8) + good[start:]


def avif_of_items(num_items: int) -> bytes:
    """A file with very many images, of which the first one counts."""
    item = heif_files.avif_item(image_files.noise(1, 90, 40))
    return heif_files.heif([item, *[heif_files.Item(b"av01", b"x")] * num_items])


def avif_in_tiles() -> bytes:
    """An image of 49 tiles, turned by a quarter."""
    tile = heif_files.avif_item(image_files.noise(1, 64, 64))
    grid = heif_files.grid_item(7, 7, 440, 420, heif_files.rotation(1))
    return heif_files.heif([grid, *[tile] * 49], [(b"dimg", 1, range(2, 51))])


def exif_of(num_entries: int, size: int = 1, offset: int = 8) -> bytes:
    """A TIFF directory whose entries are of `size` bytes at one place, with the tags 0, 1, 2, …"""
    entries = (struct.pack("<HHII", tag, 1, size, offset) for tag in range(num_entries))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", num_entries) + b"".join(entries) + bytes(4)


def exif_of_fractions(num_fractions: int) -> bytes:
    """An orientation of so many fractions, 8 bytes each."""
    data_offset = 8 + 2 + 12 + 4
    entry = struct.pack("<HHII", 0x0112, 5, num_fractions, data_offset)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", 1) + entry + bytes(4) + struct.pack("<II", 1, 3) * num_fractions


def jpeg_with_exif(exif: bytes) -> bytes:
    """Returns a JPEG with EXIF in as many segments as it takes; Pillow joins them."""
    good = image_files.encoded(image_files.noise(1, 90, 40), "JPEG")
    pieces = (exif[start : start + 65_000] for start in range(0, len(exif), 65_000))
    segments = (b"\xff\xe1" + struct.pack(">H", 8 + len(piece)) + b"Exif\0\0" + piece for piece in pieces)
    return good[:2] + b"".join(segments) + good[2:]


def webp_with_exif(exif: bytes) -> bytes:
    """Returns a WebP image with an EXIF chunk after the pixels."""
    good = image_files.encoded(image_files.noise(1, 90, 40), "WEBP", exif=exif_of(1))
    start = good.index(b"EXIF")
    body = good[12:start] + b"EXIF" + struct.pack("<I", len(exif)) + exif + bytes(len(exif) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def exif_of_noise(seed: int, num_bytes: int = 4000) -> bytes:
    """Returns EXIF with a valid header and random bytes after it."""
    return b"II*\0\x08\0\0\0" + random.Random(seed).randbytes(num_bytes)


def truncated(data: bytes) -> bytes:
    """Returns the first tenth of a valid image file."""
    return data[: len(data) // 10]


def _good_png() -> bytes:
    return image_files.encoded(image_files.noise(1, 90, 40))


def _png_with(chunks: Iterable[bytes]) -> bytes:
    good = _good_png()
    return good[:_HEAD_BYTES] + b"".join(chunks) + good[_HEAD_BYTES:]


def _chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
