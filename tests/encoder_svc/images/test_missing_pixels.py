"""A file whose pixels are cut off is refused, also if it ends as a whole file does; nothing is answered from grey."""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable, Iterator

import numpy as np
import PIL.Image
import pytest

from encoder_svc.images.decode_worker import DecodeWorker
from encoder_svc.images.image_decoder import decode_image
from lookonce.errors import ImageUndecodableError
from lookonce.process.process_clock import TimeLimits
from tests import image_files
from tests.encoder_svc.images.decoding import LIMITS

WIDTH, HEIGHT = 96, 72
END_OF_JPEG = b"\xff\xd9"
START_OF_FRAME, START_OF_PROGRESSIVE_FRAME = b"\xff\xc0", b"\xff\xc2"
# More than the last two blocks of 8 × 8 samples take in the files below. libjpeg reads ahead, so that the end of a scan
# cannot be told more exactly.
TWO_BLOCKS_BYTES = 40


@functools.cache
def picture(mode: str = "RGB") -> PIL.Image.Image:
    colours = image_files.noise(1, WIDTH, HEIGHT).effect_spread(3)
    if mode != "RGBA":
        return colours.convert(mode)
    colours.putalpha(PIL.Image.linear_gradient("L").resize(colours.size))
    return colours


def animation(file_format: str) -> bytes:
    return image_files.encoded(
        picture(), file_format, save_all=True, append_images=[image_files.noise(2, WIDTH, HEIGHT)], duration=50
    )


def interlaced_png() -> bytes:
    return image_files.png_of_samples(np.asarray(picture()), 8, 2, interlaced=True)


FILES: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: image_files.encoded(picture()),
    "interlaced PNG": interlaced_png,
    "animated PNG": lambda: animation("PNG"),
    "JPEG": lambda: image_files.encoded(picture(), "JPEG"),
    "grey JPEG": lambda: image_files.encoded(picture("L"), "JPEG"),
    "CMYK JPEG": lambda: image_files.encoded(picture("CMYK"), "JPEG"),
    "JPEG with restarts": lambda: image_files.encoded(picture(), "JPEG", restart_marker_rows=1),
    "JPEG with many restarts": lambda: image_files.encoded(picture("L"), "JPEG", restart_marker_blocks=2),
    "progressive JPEG with many restarts": lambda: image_files.encoded(
        picture(), "JPEG", progressive=True, restart_marker_blocks=1
    ),
    "progressive JPEG": lambda: image_files.encoded(picture(), "JPEG", progressive=True),
    "grey progressive JPEG": lambda: image_files.encoded(picture("L"), "JPEG", progressive=True),
    "JPEG and another": lambda: image_files.encoded(
        picture(), "MPO", save_all=True, append_images=[image_files.noise(2, WIDTH, HEIGHT)]
    ),
    "GIF": lambda: image_files.encoded(picture(), "GIF", interlace=0),
    "interlaced GIF": lambda: image_files.encoded(picture(), "GIF", interlace=1),
    "animated GIF": lambda: animation("GIF"),
    "WebP": lambda: image_files.encoded(picture(), "WEBP"),
    "lossless WebP": lambda: image_files.encoded(picture(), "WEBP", lossless=True),
    "transparent WebP": lambda: image_files.encoded(picture("RGBA"), "WEBP"),
    "animated WebP": lambda: animation("WEBP"),
    "AVIF": lambda: image_files.encoded(picture(), "AVIF"),
    "transparent AVIF": lambda: image_files.encoded(picture("RGBA"), "AVIF"),
    "animated AVIF": lambda: animation("AVIF"),
}
JPEGS = [name for name in FILES if "JPEG" in name]


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode_image(data, LIMITS)[0])


def is_refused(data: bytes) -> bool:
    try:
        decode_image(data, LIMITS)
    except ImageUndecodableError:
        return True
    return False


@pytest.fixture
def worker() -> Iterator[DecodeWorker]:
    worker = DecodeWorker(LIMITS, TimeLimits(60.0, 120.0))
    yield worker
    worker.close()


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_anywhere_is_refused_or_has_all_its_pixels(name: str) -> None:
    data = FILES[name]()
    whole = pixels(data)
    kept = [cut for cut in range(0, len(data), 13) if not is_refused(data[:cut])]
    assert all(np.array_equal(pixels(data[:cut]), whole) for cut in kept)
    assert len(kept) < len(data) // 13


def cuts_of_scans(data: bytes) -> Iterator[int]:
    """Places inside the last scan of the first picture, before its last two blocks."""
    end = data.index(END_OF_JPEG, data.index(b"\xff\xda"))
    start = data.rindex(b"\xff\xda", 0, end)
    yield from range(start + 14, end - TWO_BLOCKS_BYTES - 1, 7)


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_cut_in_its_last_scan_is_refused_although_it_has_an_end(name: str) -> None:
    data = FILES[name]()
    assert not is_refused(data)
    cuts = list(cuts_of_scans(data))
    assert len(cuts) > 10
    assert [cut for cut in cuts if not is_refused(data[:cut].removesuffix(b"\xff") + END_OF_JPEG)] == []


def test_a_progressive_jpeg_that_lost_the_end_of_an_early_scan_is_refused() -> None:
    data = FILES["progressive JPEG"]()
    starts = [start for start in range(len(data)) if data.startswith(b"\xff\xda", start)]
    num_cut = 0
    for start in starts[:-1]:
        # Each scan ends where the next one's tables or header begin.
        end = min(place for place in (data.find(b"\xff\xc4", start), data.find(b"\xff\xda", start + 2)) if place > 0)
        cut = end - 20
        if cut > start + 14:
            num_cut += 1
            assert is_refused(data[:cut] + data[end:])
    assert num_cut >= 3


@pytest.mark.parametrize("kind", [START_OF_FRAME, START_OF_PROGRESSIVE_FRAME])
def test_a_jpeg_of_some_hundred_bytes_that_claims_49_megapixels_is_refused(worker: DecodeWorker, kind: bytes) -> None:
    progressive = kind == START_OF_PROGRESSIVE_FRAME
    data = bytearray(image_files.encoded(image_files.noise(1, 16, 16), "JPEG", progressive=progressive))
    place = data.index(kind)
    data[place + 5 : place + 9] = struct.pack(">HH", 7000, 7000)
    assert len(data) < 1000
    with pytest.raises(ImageUndecodableError, match="broken or truncated"):
        worker.decode(bytes(data))


@pytest.mark.parametrize("name", JPEGS)
def test_a_whole_jpeg_has_the_pixels_that_pillow_reads(name: str) -> None:
    data = FILES[name]()
    with PIL.Image.open(io.BytesIO(data)) as stored:
        assert np.array_equal(pixels(data), np.asarray(stored.convert("RGB")))


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (17, 9), (640, 480), (1601, 1203)])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("quality", [5, 75, 100])
def test_whole_jpegs_of_every_kind_are_accepted(
    size: tuple[int, int], progressive: bool, subsampling: int, quality: int
) -> None:
    picture = image_files.noise(3, *size)
    data = image_files.encoded(picture, "JPEG", progressive=progressive, subsampling=subsampling, quality=quality)
    for behind in (b"", b"\xff\xd9", b"anything"):
        with PIL.Image.open(io.BytesIO(data)) as stored:
            assert np.array_equal(pixels(data + behind), np.asarray(stored))


def test_fill_bytes_before_the_end_of_a_jpeg_are_no_pixels() -> None:
    data = FILES["JPEG"]()
    filled = data.removesuffix(END_OF_JPEG) + b"\xff\xff\xff" + END_OF_JPEG
    assert np.array_equal(pixels(filled), pixels(data))


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("bit_depth", "colour_type", "num_bands"), [(8, 2, 3), (1, 0, 1), (16, 0, 1), (8, 6, 4)])
def test_a_png_that_lacks_whole_rows_is_refused(
    interlaced: bool, bit_depth: int, colour_type: int, num_bands: int
) -> None:
    """A compressed stream that ends after a row is complete in itself."""
    samples = np.random.default_rng(1).integers(1, 2**bit_depth, (13, 11, num_bands))
    rows = image_files.png_rows(samples, bit_depth, interlaced)
    make = functools.partial(
        image_files.png_of_rows, size=(11, 13), bit_depth=bit_depth, colour_type=colour_type, interlaced=interlaced
    )
    assert not is_refused(make(b"".join(rows)))
    for num_rows in range(len(rows)):
        assert is_refused(make(b"".join(rows[:num_rows])))
        assert is_refused(make(b"".join(rows)[:-1]))


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (2, 2), (5, 4), (9, 17)])
def test_black_rows_are_pixels(interlaced: bool, size: tuple[int, int]) -> None:
    samples = np.zeros((size[1], size[0], 3))
    data = image_files.png_of_samples(samples, 8, 2, interlaced=interlaced)
    assert np.array_equal(pixels(data), samples)
    rows = image_files.png_rows(samples, 8, interlaced)
    assert is_refused(image_files.png_of_rows(b"".join(rows[:-1]), size, interlaced=interlaced))


def test_a_png_in_many_pieces_is_whole() -> None:
    samples = np.zeros((40, 30, 3))
    good = image_files.png_of_samples(samples, 8, 2)
    assert np.array_equal(pixels(image_files.png_in_pieces(good)), samples)
