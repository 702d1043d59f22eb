"""The SDK's references to images: a digest, with the bytes if the caller has them. No pixels, no gRPC."""

from __future__ import annotations

import base64
import io
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

from lookonce.content_key import ImageDigest, image_digest, parse_digest
from lookonce.errors import InvalidParameterError

# Percent escapes of the signs of base64, and white space, which many programs put into long lines of it.
_ESCAPES = (
    (b"%2B", b"+"), (b"%2b", b"+"), (b"%2F", b"/"), (b"%2f", b"/"), (b"%3D", b"="), (b"%3d", b"="),
    (b"%0D", b""), (b"%0d", b""), (b"%0A", b""), (b"%0a", b""), (b"%20", b""),
)  # fmt: skip
_WHITE_SPACE = b" \t\r\n"
_HEX_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")

EmbeddingSource: TypeAlias = Literal["computed", "coalesced", "local cache", "shared cache", "cache"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoder's report about one image."""

    # Rows of the embedding: the prompt tokens that the image takes.
    num_rows: int
    # Size of all rows in bytes.
    size_bytes: int
    # Source of the rows; "cache" if a look-up found them.
    source: EmbeddingSource
    # Time of the forward pass in seconds; 0 if nothing was computed.
    compute_time_s: float
    # Whether the rows are in the shared cache.
    stored: bool


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A reference to one image. Two are equal if the files' bytes and the options are equal."""

    # SHA-256 of the file's original bytes.
    digest: ImageDigest = field(repr=False)
    # Bytes of the file, to upload if the server lacks the image. None: only the digest is known.
    data: bytes | None = field(default=None, repr=False, compare=False)
    # Largest number of pixels after resizing, for models with dynamic resolution. None: the model's default.
    max_pixels: int | None = None
    # For `encode` and `lookup` only: the encoding for prompts that show several images, in models where it differs
    # (LLaVA-OneVision). `generate` ignores it, since the prompt itself has the other images.
    beside_others: bool = False
    # Filled in by `encode`.
    encoding: Encoding | None = field(default=None, compare=False)

    @classmethod
    def from_bytes(cls, data: bytes, *, max_pixels: int | None = None, beside_others: bool = False) -> Self:
        """Returns a reference to an image file in memory. Hashes it, 0.6 ms per MiB.

        Raises InvalidParameterError for anything but bytes.
        """
        given: object = data
        if not isinstance(given, bytes | bytearray | memoryview):
            raise InvalidParameterError("data", f"must be bytes, not {type(given).__name__}")
        data = bytes(given)
        return cls(image_digest(data), data, max_pixels, beside_others)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, max_pixels: int | None = None, beside_others: bool = False
    ) -> Self:
        """Reads and hashes an image file on disk. Raises OSError if it cannot be read."""
        return cls.from_bytes(pathlib.Path(path).read_bytes(), max_pixels=max_pixels, beside_others=beside_others)

    @classmethod
    def from_digest(cls, digest: bytes | str, *, max_pixels: int | None = None, beside_others: bool = False) -> Self:
        """Returns a reference to an image that the server has cached, by 32 bytes or 64 hex characters.

        Raises InvalidParameterError for anything else.
        """
        given: object = digest
        if isinstance(given, str):
            if not _HEX_DIGEST.fullmatch(given):
                raise InvalidParameterError("digest", "must be 64 hexadecimal characters without spaces")
            given = bytes.fromhex(given)
        if not isinstance(given, bytes | bytearray | memoryview):
            raise InvalidParameterError("digest", f"must be bytes or text, not {type(given).__name__}")
        digest = bytes(given)
        return cls(parse_digest(digest, "digest"), None, max_pixels, beside_others)

    @property
    def hex(self) -> str:
        """The digest as 64 hex characters."""
        return self.digest.hex()


@runtime_checkable
class BinaryFile(Protocol):
    """An open file, or anything else whose `read` returns the bytes of an image file."""

    def read(self) -> bytes:
        """Returns the rest of the bytes."""
        ...


@runtime_checkable
class PilImage(Protocol):
    """An image of Pillow: any `PIL.Image.Image`."""

    @property
    def size(self) -> tuple[int, int]:
        """The width and the height in pixels."""
        ...

    def save(self, fp: Any, format: str) -> None:
        """Writes the image into a file, in this format."""
        ...

    def tobytes(self) -> bytes:
        """Returns the bytes of all pixels."""
        ...


NonTextImage: TypeAlias = "ImageRef | bytes | os.PathLike[str] | BinaryFile | PilImage"
"""An image as a part of a message, where a str is text."""

ImageLike: TypeAlias = "NonTextImage | str"
"""An image as the SDK accepts it: a reference, the bytes of a file, its path, the open file, a data URL or a PIL image.

A PIL image is sent as the PNG file that Pillow makes of it. Give the file itself where there is one: the cache knows
images by their files' bytes.
"""


def as_image(image: ImageLike) -> ImageRef:
    """Returns a reference; reads and hashes what is no reference.

    Raises OSError if a file cannot be read, and InvalidParameterError for anything else.
    """
    given: object = image
    if isinstance(given, ImageRef):
        return given
    if isinstance(given, bytes | bytearray | memoryview):
        return ImageRef.from_bytes(bytes(given))
    if isinstance(given, PilImage) and not isinstance(given, type):
        return ImageRef.from_bytes(_png_of(given))
    if isinstance(given, BinaryFile) and not isinstance(given, type):
        return ImageRef.from_bytes(_content_of_file(given))
    if not isinstance(given, str | os.PathLike):
        raise InvalidParameterError(
            "images", f"one is a {type(given).__name__}; give references, bytes, paths, files or PIL images"
        )
    if isinstance(given, str) and given[:5].lower() == "data:":
        return ImageRef.from_bytes(_content_of(given))
    if isinstance(given, str) and given[:8].lower().startswith(("http://", "https://")):
        raise InvalidParameterError("images", "one is a URL; fetch it first, for example with lookonce.ImageFetcher")
    try:
        if not os.fspath(given):
            raise InvalidParameterError("images", "one is an empty path")
        return ImageRef.from_file(given)
    except (ValueError, TypeError):
        raise InvalidParameterError("images", "one is a path that no file can have") from None


def _png_of(image: PilImage) -> bytes:
    """Returns an image as a PNG file.

    Raises InvalidParameterError for a mode that PNG does not have, such as CMYK, and for a closed or empty image.
    """
    file = io.BytesIO()
    try:
        image.save(file, "PNG")
    except (ValueError, AssertionError):
        # Pillow asserts that a file is open.
        raise InvalidParameterError("images", "one is a PIL image without pixels, or a closed one") from None
    except OSError:
        raise InvalidParameterError("images", "one is a PIL image that PNG cannot hold; convert it to RGB") from None
    return file.getvalue()


def _content_of_file(file: BinaryFile) -> bytes:
    """Raises InvalidParameterError for a closed file, and for one whose `read` returns no bytes."""
    try:
        content: object = file.read()
    except ValueError:
        raise InvalidParameterError("images", "one is a file that is closed or not open for reading") from None
    if not isinstance(content, bytes | bytearray | memoryview):
        raise InvalidParameterError("images", "one is a file that is not open for reading bytes")
    if not content:
        raise InvalidParameterError("images", "one is an open file without further bytes; was it read before?")
    return bytes(content)


def _content_of(url: str) -> bytes:
    """Returns the bytes of a data URL (RFC 2397) in base64. Raises InvalidParameterError for any other one."""
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidParameterError("images", "one is a data URL that is not in base64")
    try:
        data = content.encode("ascii")
        # Decoding all percent escapes takes seconds where there are millions. Base64 can have only these.
        for escape, sign in _ESCAPES if b"%" in data else ():
            data = data.replace(escape, sign)
        return base64.b64decode(data.translate(None, _WHITE_SPACE), validate=True)
    except ValueError:
        raise InvalidParameterError("images", "one is a data URL that is not valid base64") from None


def _check_list(images: Sequence[ImageLike]) -> None:
    """Raises InvalidParameterError for anything but a list of images."""
    given: object = images
    is_one = isinstance(given, str | bytes | bytearray | memoryview | os.PathLike)
    if is_one or not isinstance(given, Iterable):
        raise InvalidParameterError("images", f"must be a list of images, not a single {type(given).__name__}")


def as_images(images: Sequence[ImageLike]) -> list[ImageRef]:
    """Returns a reference for each image. May take milliseconds: keep it off event loops.

    Raises as `as_image`, and InvalidParameterError for anything but a list.
    """
    _check_list(images)
    return [as_image(image) for image in images]
