"""Decodes an image file to upright RGB pixels. Runs in a worker process (decode_process.py); needs only Pillow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import PIL.GifImagePlugin
import PIL.Image
import PIL.ImageFile

from encoder_svc.images.heif_pixels import load_heif
from encoder_svc.images.jpeg_scans import load_jpeg
from encoder_svc.images.pixel_modes import rgb_pixels
from encoder_svc.images.png_rows import check_rows
from lookonce.errors import ImageDecodeLimitError, ImageUndecodableError, LookonceError
from lookonce.media.heif_items import is_heif
from lookonce.media.image_header import ImageFormat, ImageHeader, ImageLimits, num_jpeg_scans, open_heif, open_image

# A progressive JPEG is decoded once per scan. 10 scans are usual; hundreds turn 100 kB into seconds of work.
_MAX_JPEG_SCAN_PIXELS = 1_000_000_000
_WHITE = (255, 255, 255)

_TRANSPOSE = PIL.Image.Transpose
# Orientation (EXIF 2.32, tag 274) → the operation that turns the stored image upright.
_UPRIGHT = {
    2: _TRANSPOSE.FLIP_LEFT_RIGHT,
    3: _TRANSPOSE.ROTATE_180,
    4: _TRANSPOSE.FLIP_TOP_BOTTOM,
    5: _TRANSPOSE.TRANSPOSE,
    6: _TRANSPOSE.ROTATE_270,
    7: _TRANSPOSE.TRANSVERSE,
    8: _TRANSPOSE.ROTATE_90,
}


def decode_image(data: bytes, limits: ImageLimits) -> tuple[PIL.Image.Image, ImageHeader]:
    """Returns the first frame, upright, as RGB over a white background (as the models' processors do), and the header.

    Raises ImageUndecodableError, ImageTooLargeError or, for a JPEG that asks for too much work, ImageDecodeLimitError.
    """
    if is_heif(data):
        return _decoded_heif(data, limits)
    with open_image(data, limits) as (stored, header):
        _check_effort(data, header)
        with _undecodable():
            image = _rgb_pixels(stored, data, header.format)
    turn = _UPRIGHT.get(header.orientation)
    return (image if turn is None else image.transpose(turn)), header


def _decoded_heif(data: bytes, limits: ImageLimits) -> tuple[PIL.Image.Image, ImageHeader]:
    picture, header = open_heif(data, limits)
    with _undecodable():
        return rgb_pixels(load_heif(picture, data), None), header


def _rgb_pixels(stored: PIL.ImageFile.ImageFile, data: bytes, file_format: ImageFormat) -> PIL.Image.Image:
    if file_format is ImageFormat.JPEG:
        return rgb_pixels(load_jpeg(stored, data), None)
    if isinstance(stored, PIL.GifImagePlugin.GifImageFile):
        return _gif_pixels(stored)
    if file_format is not ImageFormat.PNG:
        stored.load()
        return rgb_pixels(stored, None)
    # Pillow forgets the layout of the samples when it has loaded them.
    raw_mode = str(stored.tile[0].args)
    stored.load()
    check_rows(stored, data)
    return rgb_pixels(stored, raw_mode)


def _gif_pixels(stored: PIL.GifImagePlugin.GifImageFile) -> PIL.Image.Image:
    """Returns the first frame over white, as browsers show it. Pillow would give its surroundings colour 0."""
    frame = stored.dispose_extent
    stored.load()
    pixels = rgb_pixels(stored, None)
    if frame is None or frame == (0, 0, *pixels.size):
        return pixels
    canvas = PIL.Image.new("RGB", pixels.size, _WHITE)
    canvas.paste(pixels.crop(frame), frame)
    return canvas


def _check_effort(data: bytes, header: ImageHeader) -> None:
    """Raises ImageDecodeLimitError for a JPEG with too many scans."""
    if header.format is not ImageFormat.JPEG:
        return
    effort = num_jpeg_scans(data) * header.width * header.height
    if effort > _MAX_JPEG_SCAN_PIXELS:
        raise ImageDecodeLimitError(
            f"the JPEG takes {effort} pixel passes to decode, the limit is {_MAX_JPEG_SCAN_PIXELS}; "
            "save it with fewer scans or as a baseline JPEG"
        )


@contextlib.contextmanager
def _undecodable() -> Iterator[None]:
    try:
        yield
    except LookonceError:
        raise
    except MemoryError:
        raise ImageDecodeLimitError(
            "decoding the image needs more memory than is available; send a smaller image"
        ) from None
    except Exception:
        raise ImageUndecodableError("the image is broken or truncated; its pixels cannot be decoded") from None
