"""The input of one entry of the encoder cache: an image file, or a pair of video frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from lookonce.content_key import ImageDigest, image_digest, pair_digest

# Qwen-VL models encode this many video frames together (arXiv:2409.12191, section 2.1).
FRAMES_PER_PAIR = 2


@dataclass(frozen=True, slots=True)
class FramePair:
    """Two consecutive frames of a video."""

    # Both frames are image files of the same size in pixels.
    first: bytes = field(repr=False)
    # None: the first frame is used twice.
    second: bytes | None = field(repr=False)


ImageFile: TypeAlias = bytes | FramePair
"""The original bytes of an image, or of both frames of a pair."""


def files_of(image: ImageFile) -> tuple[bytes, ...]:
    """Returns the files of an image; a frame paired with itself has one."""
    if not isinstance(image, FramePair):
        return (image,)
    return (image.first,) if image.second is None else (image.first, image.second)


def num_file_bytes(image: ImageFile) -> int:
    """Returns the total size of the image's files in bytes."""
    return sum(map(len, files_of(image)))


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digests of an image or a pair."""

    # The digest that names the cache entry.
    digest: ImageDigest
    # The digest of the file, or of both frames of a pair, which may be the same.
    files: tuple[ImageDigest, ...]


def file_digests(image: ImageFile) -> FileDigests:
    """Returns the digests of an image or a pair. Takes 0.6 ms per MiB: keep photos off the event loop."""
    if not isinstance(image, FramePair):
        digest = image_digest(image)
        return FileDigests(digest, (digest,))
    first = image_digest(image.first)
    second = first if image.second is None else image_digest(image.second)
    return FileDigests(pair_digest(first, second), (first, second))


def file_digest(image: ImageFile) -> ImageDigest:
    """Returns the digest that names the cache entry of an image or a pair; see `file_digests`."""
    return file_digests(image).digest
