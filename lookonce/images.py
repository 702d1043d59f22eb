"""The SDK's references to images: a digest, with the bytes if the caller has them. No pixels, no gRPC."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

from lookonce.content_key import ImageDigest, image_digest, parse_digest
from lookonce.errors import InvalidParameterError

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


ImageLike: TypeAlias = "ImageRef | bytes | str | os.PathLike[str]"
"""An image as the SDK accepts it: a reference, the bytes of a file, or its path."""


def as_image(image: ImageLike) -> ImageRef:
    """Returns a reference; reads and hashes bytes and paths.

    Raises OSError if a file cannot be read, and InvalidParameterError for anything else.
    """
    given: object = image
    if isinstance(given, ImageRef):
        return given
    if isinstance(given, bytes | bytearray | memoryview):
        return ImageRef.from_bytes(bytes(given))
    if not isinstance(given, str | os.PathLike):
        raise InvalidParameterError("images", f"one is a {type(given).__name__}; give references, bytes or paths")
    try:
        return ImageRef.from_file(given)
    except ValueError:
        raise InvalidParameterError("images", "one is a path that no file can have") from None


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
