"""Decodes a JPEG and refuses scans that end before all of their pixels are coded.

libjpeg fills the rest of such a scan with grey and only warns, and Pillow drops the warning: 700 bytes of scan can pass
for 49 megapixels. Here the decoder gets the file piece by piece. At the end of a scan it gets some bits that are no
valid code, and then two bytes, one at a time. A decoder that has all pixels looks for the next marker and takes both. A
decoder that still expects pixels reads eight bytes at a time. The first byte may complete these eight, but then the
second one cannot, and stays with the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import PIL.Image
import PIL.ImageFile

from lookonce.errors import ImageUndecodableError

_MARKER = re.compile(rb"\xff+([^\x00\xff])")
# Inside coded pixels, FF is followed by 00 or is part of a restart marker.
_END_OF_SCAN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_FIRST_RESTART, _NUM_RESTARTS = 0xD0, 8
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
# Baseline, extended sequential, and progressive, all with Huffman codes.
_HUFFMAN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers without a length: TEM, restart markers and the start of an image.
_LONE = frozenset({0x01, *range(0xD0, 0xD9)})
# libjpeg fills a buffer of 64 bits before it decodes the last code. No Huffman code of a JPEG has only ones.
_ONES = b"\xff\x00" * 8
_PROBE = b"\x00"


def load_jpeg(stored: PIL.ImageFile.ImageFile, data: bytes) -> PIL.Image.Image:
    """Returns the pixels of an opened JPEG, as its `load` would.

    Raises ImageUndecodableError for a scan that lacks pixels. A scan that lacks no more than its last two blocks of
    8 × 8 samples may pass. So may one with arithmetic codes, in which the end of the data stands for zeros.
    """
    ends = _scan_ends(data)
    if ends is None:
        stored.load()
        return stored
    # Without a colour, no time is spent on filling it.
    image = PIL.Image.new(stored.mode, stored.size, None)
    name, extents, _, arguments = stored.tile[0]
    # `load` has no way to give the decoder other bytes than the file's, and Pillow has no public call that returns one.
    decoder = PIL.Image._getdecoder(stored.mode, name, arguments, stored.decoderconfig)
    try:
        decoder.setimage(image.im, extents)
        _feed_all(_Feeder(decoder), data, ends)
    finally:
        decoder.cleanup()
    return image


class _Feeder:
    """Passes bytes to a decoder and keeps those that it does not take."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._left = b""
        # The decoder has all pixels.
        self.is_done = False

    def takes(self, data: bytes) -> bool:
        """Whether the decoder accepts all bytes. Raises ImageUndecodableError for an error of the decoder."""
        if self.is_done:
            return True
        num_taken, error = self._decoder.decode(self._left + data)
        if error < 0:
            raise _broken()
        self.is_done = num_taken < 0
        self._left = b"" if self.is_done else (self._left + data)[num_taken:]
        return not self._left


def _feed_all(feeder: _Feeder, data: bytes, ends: list[int]) -> None:
    """Decodes the file. Raises ImageUndecodableError if a scan lacks pixels, or the file its end."""
    for start, end in zip([0, *ends], ends, strict=False):
        feeder.takes(data[start:end])
        feeder.takes(_ONES)
        _check_end(feeder)
        # A decoder that waits for the next restart marker looks like one that has all pixels.
        feeder.takes(bytes((0xFF, _FIRST_RESTART + len(_RESTART.findall(data, start, end)) % _NUM_RESTARTS)))
        _check_end(feeder)
    feeder.takes(data[ends[-1] if ends else 0 :])
    if not feeder.is_done:
        raise _broken()


def _check_end(feeder: _Feeder) -> None:
    """Raises ImageUndecodableError for a decoder that expects further pixels of the scan."""
    if not (feeder.takes(_PROBE) and feeder.takes(_PROBE)):
        raise _broken()


def _broken() -> ImageUndecodableError:
    return ImageUndecodableError("the image is broken or truncated; its pixels cannot be decoded")


def _scan_ends(data: bytes) -> list[int] | None:
    """Positions of the markers behind each scan of the first image; None if its pixels have no Huffman codes.

    A scan that ends with the file has none: the decoder then lacks bytes, and says so.
    """
    ends = []
    for marker, position in _segments(data):
        if marker in _FRAMES and marker not in _HUFFMAN_FRAMES:
            return None
        if marker == _START_OF_SCAN and (end := _END_OF_SCAN.search(data, position)):
            ends.append(end.start())
    return ends


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields (marker, position behind the segment) up to the end of the first image, as libjpeg finds them."""
    position = 2
    while found := _MARKER.search(data, position):
        marker, position = found[1][0], found.end()
        if marker == _END_OF_IMAGE:
            return
        if marker not in _LONE:
            position += int.from_bytes(data[position : position + 2], "big")
            yield marker, position
