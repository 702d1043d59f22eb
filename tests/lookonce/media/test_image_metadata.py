"""Files with too much metadata are refused before Pillow reads them; all others pass."""

from __future__ import annotations

import struct

import hypothesis
import psutil
import pytest
from hypothesis import strategies

from lookonce.errors import ImageDecodeLimitError, ImageUndecodableError
from lookonce.media.image_header import ImageLimits, probe_image
from lookonce.media.image_metadata import check_metadata
from tests import image_bombs, image_files

LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=50_000_000, max_aspect=200.0)
FILE_BYTES = 3 << 20
BOMBS = {
    "png": image_bombs.png_of_blocks,
    "jpeg": image_bombs.jpeg_of_blocks,
    "fill bytes": image_bombs.jpeg_of_fill_bytes,
    "gif": image_bombs.gif_of_blocks,
    "webp": image_bombs.webp_of_blocks,
}


@pytest.mark.parametrize("name", BOMBS)
def test_more_blocks_than_any_picture_has_cost_no_memory(name: str) -> None:
    data = BOMBS[name](FILE_BYTES)
    before = psutil.Process().memory_info().rss
    with pytest.raises(ImageDecodeLimitError, match="10000 blocks"):
        probe_image(data, LIMITS)
    assert psutil.Process().memory_info().rss - before < 4 << 20


@pytest.mark.parametrize("name", BOMBS)
def test_some_thousand_blocks_are_fine(name: str) -> None:
    header = probe_image(BOMBS[name](9000), LIMITS)
    assert (header.width, header.height) == (90, 40)


def test_metadata_may_have_some_megabytes() -> None:
    segment = b"\xff\xe4" + struct.pack(">H", 0xFFFF) + bytes(0xFFFD)
    good = image_files.encoded(image_files.noise(1, 90, 40), "JPEG")
    assert probe_image(good[:2] + segment * 100 + good[2:], LIMITS).width == 90
    with pytest.raises(ImageDecodeLimitError, match="8388608 bytes"):
        probe_image(good[:2] + segment * 130 + good[2:], LIMITS)
    with pytest.raises(ImageDecodeLimitError):
        probe_image(image_bombs.png_with_exif(image_bombs.exif_of(10) + bytes(9 << 20)), LIMITS)


def test_pixels_do_not_count_as_metadata() -> None:
    noise = image_files.noise(1, 2000, 1600).effect_spread(200)
    for file_format, options in (
        ("PNG", {"compress_level": 0}),
        ("JPEG", {"quality": 100}),
        ("WEBP", {"quality": 100}),
    ):
        data = image_files.encoded(noise, file_format, **options)
        assert probe_image(data, LIMITS).width == 2000
    assert len(image_files.encoded(noise, "PNG", compress_level=0)) > 8 << 20


def test_compressed_texts_are_unpacked_up_to_a_limit() -> None:
    assert probe_image(image_bombs.png_with_text(4, 1_000_000), LIMITS).width == 90
    with pytest.raises(ImageUndecodableError):
        probe_image(image_bombs.png_with_text(63, 1_000_000), LIMITS)


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    source=strategies.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "AVIF"]),
    flips=strategies.lists(strategies.tuples(strategies.integers(0, 700), strategies.integers(1, 255)), max_size=8),
    length=strategies.integers(0, 4000),
)
def test_damaged_files_pass(source: str, flips: list[tuple[int, int]], length: int) -> None:
    """A small file never exceeds the limits, whatever lengths its blocks claim."""
    data = bytearray(image_files.encoded(image_files.noise(3, 40, 30), source))
    for offset, mask in flips:
        data[offset % len(data)] ^= mask
    check_metadata(bytes(data[:length]))
