"""Image files for tests: good ones in all formats, and bad ones of each kind that a service must refuse."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import PIL.Image

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ORIENTATION_TAG = 0x0112


def encoded(image: PIL.Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    """The bytes of an image file."""
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def noise(seed: int = 0, width: int = 80, height: int = 60) -> PIL.Image.Image:
    """An RGB picture that differs widely between seeds."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels).resize((width, height), PIL.Image.Resampling.BICUBIC)


def oriented_jpeg(image: PIL.Image.Image, orientation: int) -> bytes:
    """A JPEG with an EXIF orientation."""
    exif = PIL.Image.Exif()
    exif[_ORIENTATION_TAG] = orientation
    return encoded(image, "JPEG", exif=exif, quality=95)


def jpeg_with_broken_exif() -> bytes:
    """A good JPEG whose EXIF block is no TIFF structure."""
    return encoded(noise(), "JPEG", exif=b"Exif\x00\x00no TIFF at all")


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return _PNG_SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(bytes(8))) + _chunk(b"IEND", b"")


def webp_of_size(width: int, height: int) -> bytes:
    """A WebP (VP8L) that claims a size of up to 16384 and holds next to no pixels."""
    bits = (width - 1) | (height - 1) << 14
    payload = b"\x2f" + bits.to_bytes(4, "little") + bytes(8)
    payload += bytes(len(payload) % 2)
    chunk = b"VP8L" + len(payload).to_bytes(4, "little") + payload
    return b"RIFF" + (len(chunk) + 4).to_bytes(4, "little") + b"WEBP" + chunk


def jpeg_of_many_scans(width: int, height: int, num_scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated: each repetition costs a pass over all pixels."""
    data = encoded(PIL.Image.new("L", (width, height)), "JPEG", progressive=True)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last_scan * num_scans + data[-2:]


def _chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
