"""Formats, upright sizes and limits, read from headers alone."""

from __future__ import annotations

import subprocess
import sys

import hypothesis
import PIL.Image
import pytest
from hypothesis import strategies
from PIL import ExifTags

from lookonce.errors import ImageDecodeLimitError, ImageTooLargeError, ImageUndecodableError, InvalidInputError
from lookonce.image_file import FramePair
from lookonce.media.image_header import ImageFormat, ImageLimits, probe_file, probe_image
from tests import image_files
from tests.conftest import REPOSITORY

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000, max_aspect=50.0)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "AVIF"])
def test_accepted_formats_give_format_and_size(file_format: str) -> None:
    header = probe_image(image_files.encoded(image_files.noise(1, 90, 40), file_format), LIMITS)
    assert header.format is ImageFormat(file_format)
    assert (header.width, header.height, header.orientation) == (90, 40, 1)


def test_animations_have_the_size_of_their_first_frame() -> None:
    frames = [image_files.noise(seed, 30, 20) for seed in range(3)]
    for file_format in ("GIF", "PNG", "WEBP", "AVIF"):
        data = image_files.encoded(frames[0], file_format, save_all=True, append_images=frames[1:])
        header = probe_image(data, LIMITS)
        assert (header.width, header.height) == (30, 20)


def test_a_jpeg_with_a_second_picture_behind_it_is_a_jpeg() -> None:
    data = image_files.encoded(image_files.noise(1), "MPO", save_all=True, append_images=[image_files.noise(2)])
    assert probe_image(data, LIMITS).format is ImageFormat.JPEG


@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_are_upright(orientation: int) -> None:
    header = probe_image(image_files.oriented_jpeg(image_files.noise(1, 90, 40), orientation), LIMITS)
    assert (header.width, header.height) == ((90, 40) if orientation < 5 else (40, 90))
    assert header.orientation == orientation


@pytest.mark.parametrize("block", image_files.ORIENTATIONS_OF_PNG, ids=lambda block: block[:4].decode())
@pytest.mark.parametrize("place", ["first", "among", "last"])
def test_a_png_may_tell_its_orientation_behind_its_pixels(place: str, block: bytes) -> None:
    plain = image_files.png_in_pieces(image_files.encoded(image_files.noise(1, 90, 40)))
    pixels = plain.index(b"IDAT") - 4
    position = {"first": pixels, "among": plain.index(b"IDAT", pixels + 8) - 4, "last": len(plain) - 12}[place]
    header = probe_image(plain[:position] + image_files.chunk(block[:4], block[4:]) + plain[position:], LIMITS)
    assert (header.width, header.height, header.orientation) == (40, 90, 6)


@pytest.mark.parametrize(("file_format", "is_turned"), [("JPEG", True), ("WEBP", True), ("AVIF", False)])
def test_an_orientation_in_xmp_counts_where_exif_has_none(file_format: str, is_turned: bool) -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    exif = PIL.Image.Exif()
    data = image_files.encoded(image_files.noise(1, 90, 40), file_format, xmp=xmp, exif=exif)
    assert probe_image(data, LIMITS).orientation == (6 if is_turned else 1)
    exif[ExifTags.Base.Orientation] = 3
    data = image_files.encoded(image_files.noise(1, 90, 40), file_format, xmp=xmp, exif=exif)
    assert probe_image(data, LIMITS).orientation == (3 if is_turned else 1)


def test_a_png_with_an_orientation_behind_too_many_blocks_is_refused() -> None:
    plain, block = image_files.encoded(image_files.noise(1, 90, 40)), image_files.ORIENTATIONS_OF_PNG[0]
    further = image_files.chunk(b"IDAT", b"") * 10_000 + image_files.chunk(block[:4], block[4:])
    with pytest.raises(ImageDecodeLimitError, match="blocks"):
        probe_image(plain[:-12] + further + plain[-12:], LIMITS)


def test_an_unknown_orientation_counts_as_none() -> None:
    assert probe_image(image_files.oriented_jpeg(image_files.noise(1), 77), LIMITS).orientation == 1


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF"])
def test_no_pixel_is_decoded(file_format: str) -> None:
    """A file that is cut off behind its header still gives its size."""
    data = image_files.encoded(image_files.noise(1, 300, 200), file_format)
    header = probe_image(data[: len(data) - len(data) // 3], LIMITS)
    assert (header.width, header.height) == (300, 200)


def test_a_jpeg_of_many_scans_counts_pixels_of_its_scans() -> None:
    header = probe_image(image_files.jpeg_of_many_scans(512, 512, 3800), LIMITS)
    assert (header.width, header.height) == (512, 512)
    assert header.num_pixels >= 90_000_000


@pytest.mark.parametrize("is_progressive", [False, True])
def test_a_jpeg_of_usual_scans_counts_width_times_height(is_progressive: bool) -> None:
    data = image_files.encoded(image_files.noise(1, 90, 40), "JPEG", progressive=is_progressive)
    assert probe_image(data, LIMITS).num_pixels == 90 * 40


def test_a_pair_counts_the_frame_that_costs_more() -> None:
    plain = image_files.encoded(image_files.noise(1, 512, 512), "JPEG")
    costly = image_files.jpeg_of_many_scans(512, 512, 3800)
    for pair in (FramePair(plain, costly), FramePair(costly, plain)):
        assert probe_file(pair, LIMITS).num_pixels >= 90_000_000


_CLAIMS = """
import resource
import sys

from lookonce.errors import ImageTooLargeError
from lookonce.media.image_header import probe_image
from tests import image_files
from tests.lookonce.media.test_image_header import LIMITS

probe_image(image_files.encoded(image_files.noise(), "WEBP"), LIMITS)
data = bytes.fromhex(sys.argv[1])
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    probe_image(data, LIMITS)
except ImageTooLargeError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib, error.message)
"""


# In a process of its own: glibc clears memory that a large test before has freed, so it counts again.
@pytest.mark.parametrize("data", [image_files.png_of_size(40_000, 40_000), image_files.webp_of_size(16_384, 16_384)])
def test_a_claimed_size_over_the_limit_costs_no_memory(data: bytes) -> None:
    command = [sys.executable, "-c", _CLAIMS, data.hex()]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120).stdout
    added_kib, _, message = printed.partition(" ")
    assert "1000000" in message
    assert int(added_kib) < 16 << 10


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"\x89PNG" + bytes(1 << 20), ["1048580", "1048576"]),
        (image_files.png_of_size(1001, 1000), ["1001 × 1000", "1000000"]),
        (image_files.png_of_size(510, 10), ["510 × 10", "51 times", "50"]),
        (image_files.png_of_size(10, 510), ["10 × 510", "51 times", "50"]),
        (image_files.png_of_size(0, 10), ["0 pixels", "1"]),
        (image_files.png_of_size(10, 0), ["0 pixels", "1"]),
    ],
)
def test_too_large_names_value_and_limit(data: bytes, parts: list[str]) -> None:
    with pytest.raises(ImageTooLargeError) as caught:
        probe_image(data, LIMITS)
    for part in parts:
        assert part in caught.value.message


def test_limits_themselves_are_accepted() -> None:
    data = image_files.encoded(image_files.noise(1, 100, 50))
    assert probe_image(data, ImageLimits(len(data), 5000, 2.0)).width == 100


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"plain text",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"%PDF-1.7",
        image_files.encoded(image_files.noise(), "BMP"),
        image_files.encoded(image_files.noise(), "TIFF"),
        image_files.encoded(PIL.Image.new("RGB", (32, 32)), "ICO"),
        image_files.encoded(image_files.noise())[:20],
        image_files.encoded(image_files.noise(), "JPEG")[:20],
        image_files.encoded(image_files.noise(), "WEBP")[:20],
        image_files.encoded(image_files.noise(), "AVIF")[:-1],
        b"\0\0\0\x18ftypisom" + bytes(12),
        image_files.jpeg_with_broken_exif(),
    ],
)
def test_anything_else_is_undecodable_and_shows_no_text_of_the_library(data: bytes) -> None:
    with pytest.raises(ImageUndecodableError) as caught:
        probe_image(data, LIMITS)
    for internal in ("0x", "BytesIO", "PIL", "Traceback", "/"):
        assert internal not in caught.value.message


def test_every_process_that_opens_an_image_has_pillows_limits() -> None:
    """Runs in a new process, since the limits belong to a process. Importing the module sets nothing."""
    program = """
import sys, PIL.Image, PIL.PngImagePlugin
before = PIL.Image.MAX_IMAGE_PIXELS, PIL.PngImagePlugin.MAX_TEXT_MEMORY
from lookonce.media.image_header import ImageLimits, probe_image
assert (PIL.Image.MAX_IMAGE_PIXELS, PIL.PngImagePlugin.MAX_TEXT_MEMORY) == before
try:
    probe_image(sys.stdin.buffer.read(), ImageLimits(1 << 20, 1_000_000, 50.0))
except Exception as error:
    print(type(error).__name__)
print(PIL.Image.MAX_IMAGE_PIXELS, PIL.PngImagePlugin.MAX_TEXT_MEMORY)
"""
    # 1.6 billion pixels, for which Pillow by itself would raise an error of its own.
    bomb = image_files.png_of_size(40_000, 40_000)
    done = subprocess.run([sys.executable, "-c", program], input=bomb, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().split() == ["ImageTooLargeError", "None", str(8 << 20)]


@pytest.mark.filterwarnings("ignore")
@hypothesis.settings(max_examples=150)
@hypothesis.given(
    source=strategies.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "AVIF"]),
    flips=strategies.lists(strategies.tuples(strategies.integers(0, 600), strategies.integers(1, 255)), max_size=8),
    length=strategies.integers(0, 4000),
)
def test_damaged_files_give_a_header_or_a_typed_error(source: str, flips: list[tuple[int, int]], length: int) -> None:
    data = bytearray(image_files.oriented_jpeg(image_files.noise(3, 40, 30), 6))
    if source != "JPEG":
        data = bytearray(image_files.encoded(image_files.noise(3, 40, 30), source))
    for offset, mask in flips:
        data[offset % len(data)] ^= mask
    try:
        header = probe_image(bytes(data[:length]), LIMITS)
    except InvalidInputError:
        return
    assert 1 <= header.width * header.height <= LIMITS.max_pixels
