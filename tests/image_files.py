"""Image files for tests: good ones in all formats, and bad ones of each kind that a service must refuse."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import PIL.Image

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ORIENTATION_TAG = 0x0112
# First column, first row, column step and row step of each pass of an interlaced PNG.
_ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]

_EXIF_TURN = b"II*\0" + struct.pack("<IHHHIHH", 8, 1, 0x112, 3, 1, 6, 0) + bytes(4)
# Names and contents of PNG blocks that tell orientation 6, a quarter turn.
ORIENTATIONS_OF_PNG = (
    b"eXIf" + _EXIF_TURN,
    b'iTXtXML:com.adobe.xmp\0\0\0\0\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>',
    b"tEXtRaw profile type exif\0\nexif\n%8d\n%s\n" % (len(_EXIF_TURN) + 6, (b"Exif\0\0" + _EXIF_TURN).hex().encode()),
)


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
    return _PNG_SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(8))) + chunk(b"IEND", b"")


def png_of_samples(
    samples: np.ndarray, bit_depth: int, colour_type: int, *, transparent: bytes | None = None, interlaced: bool = False
) -> bytes:
    """A PNG of samples [height, width, bands]; `transparent` is the content of its tRNS chunk."""
    return png_of_rows(
        b"".join(png_rows(samples, bit_depth, interlaced)),
        samples.shape[1::-1],
        bit_depth,
        colour_type,
        transparent,
        interlaced,
    )


def png_of_rows(
    rows: bytes,
    size: tuple[int, ...],
    bit_depth: int = 8,
    colour_type: int = 2,
    transparent: bytes | None = None,
    interlaced: bool = False,
) -> bytes:
    """A PNG with this content of its rows, which may be less than the size (width, height) needs."""
    header = struct.pack(">IIBBBBB", *size, bit_depth, colour_type, 0, 0, interlaced)
    chunks = [chunk(b"IHDR", header)]
    if transparent is not None:
        chunks.append(chunk(b"tRNS", transparent))
    return b"".join([_PNG_SIGNATURE, *chunks, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")])


def gif_of_frame(
    indexes: np.ndarray,
    colours: np.ndarray,
    canvas: tuple[int, int],
    corner: tuple[int, int],
    transparent: int | None = None,
    *,
    has_own_colours: bool = False,
) -> bytes:
    """A GIF of one frame of four colours, `indexes` [height, width] and `colours` [4, 3], at a corner of the canvas.

    The colours are the canvas's, or the frame's own. The canvas's background colour is number 3.
    """
    height, width = indexes.shape
    palette = colours.astype(np.uint8).tobytes()
    control = b"" if transparent is None else struct.pack("<BBBBHBB", 0x21, 0xF9, 4, 1, 0, transparent, 0)
    # Each code takes three bits: clear (4), then one index, so that the width of codes never grows.
    codes = [code for index in indexes.flatten() for code in (4, int(index))] + [5]
    bits = np.array([code >> shift & 1 for code in codes for shift in range(3)], np.uint8)
    packed = np.packbits(bits, bitorder="little").tobytes()
    blocks = b"".join(
        bytes([len(part)]) + part for part in (packed[start : start + 255] for start in range(0, len(packed), 255))
    )
    flags = 0x81
    screen = struct.pack("<6sHHBBB", b"GIF89a", *canvas, 0 if has_own_colours else flags, 3, 0)
    frame = struct.pack("<BHHHHB", 0x2C, *corner, width, height, flags if has_own_colours else 0)
    colours_of = (b"", palette) if has_own_colours else (palette, b"")
    return b"".join([screen, colours_of[0], control, frame, colours_of[1], b"\x02", blocks, b"\0\x3b"])


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


def png_in_pieces(data: bytes) -> bytes:
    """A PNG with one chunk of pixels, in chunks of one byte each."""
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    pieces = (chunk(b"IDAT", bytes([byte])) for byte in data[start + 8 : end - 4])
    return data[:start] + b"".join(pieces) + data[end:]


def png_rows(samples: np.ndarray, bit_depth: int, interlaced: bool) -> list[bytes]:
    """The rows of samples [height, width, bands] in the order of a PNG, each behind its filter byte."""
    grids = _ADAM7 if interlaced else [(0, 0, 1, 1)]
    return [_row(row, bit_depth) for x, y, dx, dy in grids for row in samples[y::dy, x::dx] if row.size]


def _row(samples: np.ndarray, bit_depth: int) -> bytes:
    if bit_depth >= 8:
        return b"\0" + samples.astype(">u2" if bit_depth == 16 else np.uint8).tobytes()
    bits = np.unpackbits(samples.astype(np.uint8).reshape(-1, 1), axis=1)[:, -bit_depth:]
    return b"\0" + np.packbits(bits.flatten()).tobytes()


def chunk(kind: bytes, payload: bytes) -> bytes:
    """A block of a PNG."""
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
