"""Every pixel mode that a file can carry becomes the RGB pixels that a person sees, in the real decoding process."""

from __future__ import annotations

import io
import struct

import numpy as np
import PIL.Image
import pytest

from encoder_svc.images.decode_worker import DecodeWorker
from encoder_svc.images.pixel_modes import rgb_pixels
from lookonce.errors import ImageUndecodableError
from tests import image_files

WIDTH, HEIGHT = 40, 30
WHITE = 255
# A JPEG's colours are rounded and blurred.
JPEG_TOLERANCE = 6
GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6


def decoded(worker: DecodeWorker, data: bytes) -> np.ndarray:
    """Pixels [height, width, 3] from the decoding process."""
    return np.asarray(worker.decode(data)[0])


def samples(num_bands: int, maximum: int = 255) -> np.ndarray:
    """Random samples [HEIGHT, WIDTH, num_bands] from 0 to `maximum`."""
    return np.random.default_rng(7).integers(0, maximum + 1, (HEIGHT, WIDTH, num_bands))


def grey_as_rgb(grey: np.ndarray) -> np.ndarray:
    """Grey samples [height, width] in three equal bands."""
    return np.repeat(grey.reshape(HEIGHT, WIDTH, 1), 3, axis=2)


def over_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Colours [height, width, 3] over white; `alpha` is [height, width]."""
    share = alpha.reshape(HEIGHT, WIDTH, 1) / 255
    return np.rint(rgb * share + WHITE * (1 - share))


def image_of(array: np.ndarray, mode: str) -> PIL.Image.Image:
    return PIL.Image.frombytes(mode, (WIDTH, HEIGHT), array.astype(np.uint8).tobytes())


def test_1(worker: DecodeWorker) -> None:
    bits = samples(1, 1) * 255
    data = image_files.encoded(image_of(bits, "L").convert("1"))
    assert np.array_equal(decoded(worker, data), grey_as_rgb(bits))


@pytest.mark.parametrize("file_format", ["PNG", "GIF"])
def test_l(worker: DecodeWorker, file_format: str) -> None:
    grey = samples(1)
    assert np.array_equal(decoded(worker, image_files.encoded(image_of(grey, "L"), file_format)), grey_as_rgb(grey))


def test_l_in_a_jpeg(worker: DecodeWorker) -> None:
    grey = PIL.Image.linear_gradient("L").resize((WIDTH, HEIGHT))
    found = decoded(worker, image_files.encoded(grey, "JPEG", quality=100))
    assert np.abs(found.astype(int) - grey_as_rgb(np.asarray(grey))).max() <= JPEG_TOLERANCE


@pytest.mark.parametrize("bits", [2, 4])
def test_l_of_few_bits(worker: DecodeWorker, bits: int) -> None:
    grey = samples(1, 2**bits - 1)
    data = image_files.png_of_samples(grey, bits, GREY)
    assert np.array_equal(decoded(worker, data), grey_as_rgb(grey * (255 // (2**bits - 1))))


@pytest.mark.parametrize(("bits", "key"), [(1, 0), (1, 1), (2, 2), (4, 9), (8, 77)])
def test_a_transparent_grey_is_white(worker: DecodeWorker, bits: int, key: int) -> None:
    grey = samples(1, 2**bits - 1)
    data = image_files.png_of_samples(grey, bits, GREY, transparent=struct.pack(">H", key))
    expected = np.where(grey == key, WHITE, grey * (255 // (2**bits - 1)))
    assert np.array_equal(decoded(worker, data), grey_as_rgb(expected))


def test_16_bits_of_grey_are_scaled_like_those_of_colour(worker: DecodeWorker) -> None:
    grey = samples(1, 65_535)
    found = decoded(worker, image_files.png_of_samples(grey, 16, GREY))
    assert np.array_equal(found, grey_as_rgb(grey >> 8))
    coloured = image_files.png_of_samples(np.repeat(grey, 3, axis=2), 16, RGB)
    assert np.array_equal(found, decoded(worker, coloured))


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_modes_of_16_bits_in_a_png(worker: DecodeWorker, mode: str) -> None:
    grey = samples(1, 65_535)
    dtype = "<u2" if mode == "I;16" else ">u2"
    image = PIL.Image.frombytes(mode, (WIDTH, HEIGHT), grey.astype(dtype).tobytes())
    assert np.array_equal(decoded(worker, image_files.encoded(image)), grey_as_rgb(grey >> 8))


@pytest.mark.parametrize("key", [0, 0x1234, 0xFFFF])
def test_a_transparent_grey_of_16_bits_is_white_and_its_neighbour_is_not(worker: DecodeWorker, key: int) -> None:
    grey = samples(1, 65_535)
    grey[0, :3, 0] = key, key ^ 1, key
    data = image_files.png_of_samples(grey, 16, GREY, transparent=struct.pack(">H", key))
    assert np.array_equal(decoded(worker, data), grey_as_rgb(np.where(grey == key, WHITE, grey >> 8)))


def test_p(worker: DecodeWorker) -> None:
    image = image_of(samples(3), "RGB").quantize(64)
    expected = np.asarray(image.convert("RGB"))
    for file_format in ("PNG", "GIF"):
        assert np.array_equal(decoded(worker, image_files.encoded(image, file_format)), expected)


@pytest.mark.parametrize("file_format", ["PNG", "GIF"])
def test_p_with_a_transparent_colour(worker: DecodeWorker, file_format: str) -> None:
    indexes = samples(1, 2)
    image = image_of(indexes, "P")
    colours = np.array([[10, 20, 30], [200, 100, 50], [90, 80, 70]])
    image.putpalette(colours.flatten().tolist())
    data = image_files.encoded(image, file_format, transparency=1)
    expected = np.where(indexes == 1, WHITE, colours[indexes[..., 0]])
    assert np.array_equal(decoded(worker, data), expected)


@pytest.mark.parametrize("key", [None, 0, 1])
@pytest.mark.parametrize("has_own_colours", [False, True])
def test_a_gif_is_white_around_a_first_frame_that_is_smaller(
    worker: DecodeWorker, key: int | None, has_own_colours: bool
) -> None:
    """Browsers show nothing there, not the background colour that the file names nor the first one of its colours."""
    indexes = samples(1, 2)[..., 0]
    colours = np.array([[10, 20, 30], [200, 100, 50], [90, 80, 70], [0, 0, 0]])
    data = image_files.gif_of_frame(indexes, colours, (70, 50), (7, 11), key, has_own_colours=has_own_colours)
    expected = np.full((50, 70, 3), WHITE)
    frame = np.where((indexes == key)[..., None], WHITE, colours[indexes])
    expected[11 : 11 + HEIGHT, 7 : 7 + WIDTH] = frame
    assert np.array_equal(decoded(worker, data), expected)


def test_a_gif_whose_first_frame_reaches_over_its_canvas_shows_all_of_the_frame(worker: DecodeWorker) -> None:
    indexes, colours = samples(1, 2)[..., 0], np.array([[10, 20, 30], [200, 100, 50], [90, 80, 70], [0, 0, 0]])
    found = decoded(worker, image_files.gif_of_frame(indexes, colours, (20, 20), (0, 5)))
    assert (found[:5, :WIDTH] == WHITE).all()
    assert np.array_equal(found[5 : 5 + HEIGHT, :WIDTH], colours[indexes])


def test_p_with_half_transparent_colours(worker: DecodeWorker) -> None:
    indexes = samples(1, 2)
    image = image_of(indexes, "P")
    colours, alphas = np.array([[10, 20, 30], [200, 100, 50], [90, 80, 70]]), np.array([255, 128, 0])
    image.putpalette(colours.flatten().tolist())
    data = image_files.encoded(image, "PNG", transparency=bytes(alphas.tolist()))
    expected = over_white(colours[indexes[..., 0]], alphas[indexes[..., 0]])
    assert np.abs(decoded(worker, data) - expected).max() <= 1


def test_rgb(worker: DecodeWorker) -> None:
    colours = samples(3)
    image = image_of(colours, "RGB")
    assert np.array_equal(decoded(worker, image_files.encoded(image)), colours)
    assert np.array_equal(decoded(worker, image_files.encoded(image, "WEBP", lossless=True)), colours)


def test_rgb_of_16_bits(worker: DecodeWorker) -> None:
    colours = samples(3, 65_535)
    assert np.array_equal(decoded(worker, image_files.png_of_samples(colours, 16, RGB)), colours >> 8)


@pytest.mark.parametrize("bits", [8, 16])
def test_rgb_with_a_transparent_colour(worker: DecodeWorker, bits: int) -> None:
    colours = samples(3, 2**bits - 1)
    key = colours[3, 5]
    data = image_files.png_of_samples(colours, bits, RGB, transparent=struct.pack(">3H", *key))
    is_key = (colours == key).all(axis=2, keepdims=True)
    assert is_key.any()
    assert np.array_equal(decoded(worker, data), np.where(is_key, WHITE, colours >> (bits - 8)))


@pytest.mark.parametrize("bits", [8, 16])
def test_la(worker: DecodeWorker, bits: int) -> None:
    both = samples(2, 2**bits - 1)
    grey, alpha = both[..., 0] >> (bits - 8), both[..., 1] >> (bits - 8)
    data = image_files.png_of_samples(both, bits, GREY_ALPHA)
    assert np.abs(decoded(worker, data) - over_white(grey_as_rgb(grey), alpha)).max() <= 1


@pytest.mark.parametrize("bits", [8, 16])
def test_rgba(worker: DecodeWorker, bits: int) -> None:
    four = samples(4, 2**bits - 1)
    eight = four >> (bits - 8)
    data = image_files.png_of_samples(four, bits, RGB_ALPHA)
    assert np.abs(decoded(worker, data) - over_white(eight[..., :3], eight[..., 3])).max() <= 1


def test_rgba_in_a_webp(worker: DecodeWorker) -> None:
    four = samples(4)
    data = image_files.encoded(image_of(four, "RGBA"), "WEBP", lossless=True, exact=True)
    assert np.abs(decoded(worker, data) - over_white(four[..., :3], four[..., 3])).max() <= 1


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr"])
def test_the_colour_spaces_of_a_jpeg(worker: DecodeWorker, mode: str) -> None:
    picture = image_files.noise(4, WIDTH, HEIGHT)
    data = image_files.encoded(picture.convert(mode), "JPEG", quality=100, subsampling=0)
    with PIL.Image.open(io.BytesIO(data)) as stored:
        assert stored.mode == ("CMYK" if mode == "CMYK" else "RGB")
    assert np.abs(decoded(worker, data).astype(int) - np.asarray(picture)).max() <= JPEG_TOLERANCE


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B", "F", "LAB"])
def test_a_tiff_is_refused_in_every_mode(worker: DecodeWorker, mode: str) -> None:
    data = image_files.encoded(PIL.Image.new(mode, (WIDTH, HEIGHT)), "TIFF")
    with pytest.raises(ImageUndecodableError, match="not an image of an accepted format"):
        worker.decode(data)


@pytest.mark.parametrize("mode", ["I", "F", "PA", "La", "RGBa", "YCbCr", "LAB", "HSV"])
def test_a_mode_that_no_accepted_file_has_is_refused_instead_of_guessed(mode: str) -> None:
    with pytest.raises(ImageUndecodableError, match="8 or 16 bits"):
        rgb_pixels(PIL.Image.new(mode, (2, 2)), None)
