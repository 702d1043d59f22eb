"""Image files are decoded to the pixels that a person sees, and broken ones to an error of their own."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from encoder_svc.images.image_decoder import decode_image
from lookonce.errors import ImageDecodeLimitError, ImageUndecodableError
from lookonce.media.image_header import ImageLimits
from tests import image_files

LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=50_000_000, max_aspect=200.0)


def pixels(data: bytes) -> np.ndarray:
    """Pixels [height, width, 3] of the decoded file."""
    image, header = decode_image(data, LIMITS)
    assert image.mode == "RGB"
    assert image.size == (header.width, header.height)
    return np.asarray(image)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(orientation: int) -> None:
    data = image_files.oriented_jpeg(image_files.noise(1, 90, 40), orientation)
    with PIL.Image.open(io.BytesIO(data)) as stored:
        upright = PIL.ImageOps.exif_transpose(stored).convert("RGB")
    assert np.array_equal(pixels(data), np.asarray(upright))


def test_transparency_lies_over_white() -> None:
    image = PIL.Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert pixels(image_files.encoded(image)).tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_a_transparent_palette_colour_lies_over_white() -> None:
    image = PIL.Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    data = image_files.encoded(image, "PNG", transparency=0)
    assert pixels(data).tolist() == [[[255, 255, 255], [200, 100, 50]]]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_colour_mode_becomes_rgb(mode: str) -> None:
    image = PIL.Image.new("RGB", (8, 8), (250, 250, 250)).convert(mode)
    data = image_files.encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    assert abs(int(pixels(data).mean()) - 250) <= 5


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP", "AVIF"])
def test_the_first_frame_of_an_animation_counts(file_format: str) -> None:
    red, blue = (PIL.Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    data = image_files.encoded(red, file_format, save_all=True, append_images=[blue], duration=50)
    assert np.abs(pixels(data).astype(int) - (255, 0, 0)).max() <= 3


def test_of_an_animated_png_the_default_image_counts_although_the_animation_leaves_it_out() -> None:
    red, *frames = (PIL.Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green"))
    data = image_files.encoded(red, "PNG", save_all=True, append_images=frames, default_image=True)
    assert (pixels(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "AVIF"])
def test_a_truncated_file_is_undecodable(file_format: str) -> None:
    data = image_files.encoded(image_files.noise(1, 300, 200), file_format)
    with pytest.raises(ImageUndecodableError):
        decode_image(data[: len(data) * 2 // 3], LIMITS)


def test_a_file_that_holds_fewer_pixels_than_it_claims_is_undecodable() -> None:
    with pytest.raises(ImageUndecodableError, match="broken or truncated"):
        decode_image(image_files.png_of_size(2000, 1000), LIMITS)


def test_a_jpeg_of_many_scans_is_refused_before_it_costs_anything() -> None:
    data = image_files.jpeg_of_many_scans(4000, 4000, 60)
    assert len(data) < 1 << 20
    with pytest.raises(ImageDecodeLimitError, match="1000000000"):
        decode_image(data, LIMITS)


def test_an_ordinary_progressive_jpeg_is_accepted() -> None:
    data = image_files.encoded(image_files.noise(1, 1200, 900), "JPEG", progressive=True)
    assert pixels(data).shape == (900, 1200, 3)
