"""Images as a caller of the SDK names them: a digest, and the bytes where the caller has them. No pixels, no gRPC."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

from lookonce.content_key import ImageDigest, image_digest, parse_digest
from lookonce.errors import InvalidParameterError

EmbeddingSource: TypeAlias = Literal["computed", "coalesced", "local cache", "shared cache", "cache"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """What the encoder said about one image."""

    # Rows of the embedding, i.e. prompt tokens that the image takes.
    num_rows: int
    # Size of the rows.
    size_bytes: int
    # Where the rows came from; "cache" when a look-up found them.
    source: EmbeddingSource
    # Time in the model, 0 when nothing was computed.
    compute_time_s: float
    # Whether the rows are in the shared cache.
    stored: bool


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image. Equal when the file's bytes and the options are."""

    # SHA-256 of the file's original bytes.
    digest: ImageDigest = field(repr=False)
    # The file, so that it can be uploaded when the server lacks it. None: only the digest is known.
    data: bytes | None = field(default=None, repr=False, compare=False)
    # Upper bound of pixels after resizing, for models with dynamic resolution. None: the model's default.
    max_pixels: int | None = None
    # For calls about encodings only: as it is encoded for prompts that show others, too, where that makes a difference
    # (LLaVA-OneVision). In a prompt the other images tell.
    beside_others: bool = False
    # Filled in by `encode`.
    encoding: Encoding | None = field(default=None, compare=False)

    @classmethod
    def from_bytes(cls, data: bytes, *, max_pixels: int | None = None, beside_others: bool = False) -> Self:
        """An image file in memory; hashes it (0.6 ms per MiB)."""
        return cls(image_digest(data), data, max_pixels, beside_others)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, max_pixels: int | None = None, beside_others: bool = False
    ) -> Self:
        """An image file on disk; reads and hashes it. Raises OSError when it cannot be read."""
        return cls.from_bytes(pathlib.Path(path).read_bytes(), max_pixels=max_pixels, beside_others=beside_others)

    @classmethod
    def from_digest(cls, digest: bytes | str, *, max_pixels: int | None = None, beside_others: bool = False) -> Self:
        """An image that the server should know: 32 bytes, or 64 hex characters. Raises InvalidParameterError."""
        if isinstance(digest, str):
            try:
                digest = bytes.fromhex(digest)
            except ValueError:
                raise InvalidParameterError("digest", "must be hexadecimal") from None
        return cls(parse_digest(digest, "digest"), None, max_pixels, beside_others)

    @property
    def hex(self) -> str:
        """The digest as 64 hex characters."""
        return self.digest.hex()


ImageLike: TypeAlias = "ImageRef | bytes | str | os.PathLike[str]"
"""What the SDK takes for an image: a reference, the bytes of a file, or its path."""


def as_image(image: ImageLike) -> ImageRef:
    """Reads and hashes what is not a reference yet. Raises OSError when a file cannot be read."""
    if isinstance(image, ImageRef):
        return image
    if isinstance(image, bytes | bytearray | memoryview):
        return ImageRef.from_bytes(bytes(image))
    return ImageRef.from_file(image)


def as_images(images: Sequence[ImageLike]) -> list[ImageRef]:
    """`as_image` of each. May take milliseconds: keep it off event loops."""
    if isinstance(images, str | bytes):
        raise InvalidParameterError("images", "must be a list of images, not one")
    return [as_image(image) for image in images]
