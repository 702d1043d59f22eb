"""Reads size and format of an image file from its header, and checks limits before any pixel is decoded.

The encoder uses it before decoding, the decoder for the layout of a prompt. It needs Pillow, so the SDK does not import
it. Pillow's own messages contain heap addresses and are never passed on.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import PIL.Image
import PIL.ImageFile
import PIL.PngImagePlugin
from PIL import ExifTags

from lookonce.errors import ImageTooLargeError, ImageUndecodableError, InvalidParameterError
from lookonce.image_file import ImageFile, files_of
from lookonce.media.heif_items import is_heif
from lookonce.media.heif_picture import AV1, HEVC, HeifPicture, read_picture
from lookonce.media.image_metadata import check_exif, check_metadata, with_orientation_first

# Unpacked size of a PNG's compressed texts. 70 kB of them can expand to Pillow's own limit of 64 MiB.
_MAX_PNG_TEXT_BYTES = 8 << 20

# Tiles reach over the edges of an image, each by less than its own size.
_MAX_TILE_SHARE = 2

# A progressive JPEG is decoded once per scan, and ten scans are usual.
_USUAL_JPEG_SCANS = 10
_JPEG_START_OF_SCAN = b"\xff\xda"

# EXIF orientations that swap width and height.
_SIDEWAYS = frozenset({5, 6, 7, 8})
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class ImageFormat(enum.Enum):
    """Accepted file formats. Of an animation only the first frame is used."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WEBP"
    GIF = "GIF"
    AVIF = "AVIF"
    HEIC = "HEIC"


_FORMAT_OF_CODING = {AV1: ImageFormat.AVIF, HEVC: ImageFormat.HEIC}
# Formats whose header Pillow reads.
_PILLOW_FORMATS = [format.value for format in ImageFormat if format not in _FORMAT_OF_CODING.values()]
# Phones often write MPO: a JPEG followed by further pictures.
_FORMAT_OF_PILLOW = {name: ImageFormat(name) for name in _PILLOW_FORMATS} | {"MPO": ImageFormat.JPEG}
_ACCEPTED = ", ".join(format.value for format in ImageFormat)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Largest values that are accepted for an image."""

    # Bytes of the file.
    max_bytes: int
    # Width times height.
    max_pixels: int
    # Longer side over shorter side.
    max_aspect: float


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format, size and orientation from an image file's header."""

    format: ImageFormat
    # Upright size in pixels: after applying the orientation.
    width: int
    height: int
    # EXIF orientation 1..8, 1 where there is none, and in AVIF and HEIC, which have transformations of their own.
    orientation: int
    # Pixels that decoding computes, if those are others than the image's: tiles reach over its border, a crop hides
    # some, opacity is a picture of its own, and a JPEG of unusually many scans is decoded once per scan.
    num_decoded_pixels: int = field(default=0, compare=False)

    @property
    def num_pixels(self) -> int:
        """The number of pixels that decoding costs, at least width times height."""
        return max(self.width * self.height, self.num_decoded_pixels)


@functools.cache
def set_pillow_limits() -> None:
    """Sets Pillow's limits for this process; later calls have no effect.

    `open_image` calls it, so no file is opened without the limits, whichever process opens it.
    """
    # Pillow would warn above 89 million pixels and raise above twice as many; `ImageLimits` is checked instead.
    PIL.Image.MAX_IMAGE_PIXELS = None
    PIL.PngImagePlugin.MAX_TEXT_MEMORY = _MAX_PNG_TEXT_BYTES
    # Pillow warns about each wrong entry of an EXIF block, which may have 65535 of them.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


def probe_image(data: bytes, limits: ImageLimits) -> ImageHeader:
    """Reads and checks the header of an image file.

    Raises ImageUndecodableError if the file is not an image of an accepted format, ImageTooLargeError with value and
    limit for too many bytes or pixels, an extreme aspect ratio or a side of zero pixels, and ImageDecodeLimitError for
    more metadata than an image needs.
    """
    if is_heif(data):
        return open_heif(data, limits)[1]
    with open_image(data, limits) as (_, header):
        return header


def probe_file(image: ImageFile, limits: ImageLimits) -> ImageHeader:
    """Reads the header as `probe_image` does; of a pair, returns the first frame's header.

    Its `num_pixels` is that of the frame that costs more. Raises InvalidParameterError for frames of different sizes.
    """
    headers = [probe_image(data, limits) for data in files_of(image)]
    check_one_size(headers, "second_frame")
    return replace(headers[0], num_decoded_pixels=max(header.num_pixels for header in headers))


def num_jpeg_scans(data: bytes) -> int:
    """Returns an upper bound of the number of scans in a JPEG: start markers never occur in entropy-coded data."""
    return data.count(_JPEG_START_OF_SCAN)


def check_one_size(frames: Sequence[ImageHeader], field: str) -> None:
    """Raises InvalidParameterError naming `field` unless all frames of a video have the same size."""
    sizes = list(dict.fromkeys((frame.width, frame.height) for frame in frames))
    if len(sizes) > 1:
        (width, height), (other_width, other_height) = sizes[:2]
        raise InvalidParameterError(
            field, f"must all have one size, not {width}×{height} and {other_width}×{other_height} pixels"
        )


def open_heif(data: bytes, limits: ImageLimits) -> tuple[HeifPicture, ImageHeader]:
    """Checks a HEIC or AVIF file as `probe_image` does; returns the structure of its primary image, and the header."""
    check_file_size(data, limits)
    picture = read_picture(data)
    width, height = picture.upright_size
    _check_size(picture.width, picture.height, limits)
    _check_size(width, height, limits)
    if picture.num_coded_pixels > _MAX_TILE_SHARE * limits.max_pixels:
        raise ImageTooLargeError(
            f"the tiles of the image have {picture.num_coded_pixels} pixels, "
            f"the limit is {_MAX_TILE_SHARE * limits.max_pixels}; send it smaller"
        )
    return picture, ImageHeader(_FORMAT_OF_CODING[picture.coding], width, height, 1, picture.num_decoded_pixels)


@contextlib.contextmanager
def open_image(data: bytes, limits: ImageLimits) -> Iterator[tuple[PIL.ImageFile.ImageFile, ImageHeader]]:
    """Checks a file that is no HEIF as `probe_image` does; yields the Pillow image and the header.

    The image is not yet decoded or turned.
    """
    set_pillow_limits()
    check_file_size(data, limits)
    data = with_orientation_first(data)
    check_metadata(data)
    image = _opened(data)
    with image:
        _check_size(image.width, image.height, limits)
        yield image, _with_scans(_header(image), data)


def check_file_size(data: bytes, limits: ImageLimits) -> None:
    """Raises ImageTooLargeError for too many bytes, ImageUndecodableError for an empty file."""
    if not data:
        raise ImageUndecodableError("the image is empty; send the bytes of a file")
    if len(data) > limits.max_bytes:
        raise ImageTooLargeError(
            f"the image file has {len(data)} bytes, the limit is {limits.max_bytes}; send a smaller file"
        )


def _opened(data: bytes) -> PIL.ImageFile.ImageFile:
    try:
        return PIL.Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS)
    except Exception:
        # Pillow may raise any exception for bad bytes.
        if _has_zero_side(data):
            raise ImageTooLargeError("the image has a side of 0 pixels, at least 1 is needed") from None
        raise ImageUndecodableError(f"the bytes are not an image of an accepted format ({_ACCEPTED})") from None


def _header(image: PIL.Image.Image) -> ImageHeader:
    orientation = _orientation(image)
    width, height = image.size if orientation not in _SIDEWAYS else reversed(image.size)
    return ImageHeader(_FORMAT_OF_PILLOW[image.format or ""], width, height, orientation)


def _with_scans(header: ImageHeader, data: bytes) -> ImageHeader:
    """Counts the pixels of each ten scans of a JPEG, since the cost of one scan depends on what it holds."""
    if header.format is not ImageFormat.JPEG:
        return header
    num_passes = num_jpeg_scans(data) // _USUAL_JPEG_SCANS
    return replace(header, num_decoded_pixels=num_passes * header.width * header.height)


def _orientation(image: PIL.Image.Image) -> int:
    """Returns 1..8. Raises ImageUndecodableError for a broken EXIF block, since a guess could turn the picture."""
    # Some tools write EXIF as hexadecimal text, which a PNG may compress.
    check_exif(len(image.info.get("Raw profile type exif", "")) // 2)
    try:
        if "exif" in image.info:
            # Pillow ignores the fault when it opens a JPEG, and never reports it.
            PIL.Image.Exif().load(image.info["exif"])
        # The base class's method: that of PNG would decode all pixels to find an EXIF block behind them.
        orientation = PIL.Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:
        raise ImageUndecodableError("the image's EXIF block is broken; save the image without EXIF") from None
    return int(orientation) if orientation in range(1, 9) else 1


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    size = f"{width} × {height} pixels"
    if width < 1 or height < 1:
        raise ImageTooLargeError(f"the image has {size}, at least 1 × 1 is needed")
    if width * height > limits.max_pixels:
        raise ImageTooLargeError(f"the image has {size}, the limit is {limits.max_pixels} in all; send it smaller")
    aspect = max(width, height) / min(width, height)
    if aspect > limits.max_aspect:
        raise ImageTooLargeError(
            f"the image has {size}, one side is {aspect:.0f} times the other, the limit is {limits.max_aspect:g}"
        )


def _has_zero_side(data: bytes) -> bool:
    """Tells whether a PNG has a side of zero pixels, which Pillow reports as an unidentified file."""
    return data.startswith(_PNG_SIGNATURE) and len(data) >= 24 and (data[16:20] == bytes(4) or data[20:24] == bytes(4))
