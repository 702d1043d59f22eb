"""The SDK's references to videos: the frames that the caller sampled. No pixels, no gRPC."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lookonce.errors import InvalidParameterError
from lookonce.image_file import FRAMES_PER_PAIR
from lookonce.images import ImageLike, ImageRef, as_images


@dataclass(frozen=True, slots=True)
class Video:
    """A video in a chat message, for models that accept videos (`model_info().max_video_frames` > 0).

    If the server lacks a frame, the client sends all frames of the video in one message, which raises
    MessageTooLargeError if they exceed `model_info().max_message_bytes`.
    """

    # Frames in order, evenly sampled and all of one size in pixels.
    frames: tuple[ImageRef, ...]
    # Frames per second of the video, 0.001 to 1000. None: the server's default, 2.
    fps: float | None = None
    # Largest number of pixels of a frame after resizing. None: the model's default.
    max_pixels: int | None = None
    # Width and height of the frames in pixels. If it is given, the client sends digests first, as for images;
    # otherwise it sends the bytes every time.
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidParameterError for a size that is no pair of whole numbers."""
        if self.size is not None and not _is_pair(self.size):
            raise InvalidParameterError("size", f"must be width and height in pixels, got {self.size!r}")

    @classmethod
    def from_frames(
        cls,
        frames: Sequence[ImageLike],
        *,
        fps: float | None = None,
        max_pixels: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> Self:
        """Reads and hashes the frames: references, bytes or paths of image files.

        Raises OSError if a file cannot be read, and InvalidParameterError for less than two frames, frames with options
        of their own, or frames by digest without a `size`.
        """
        refs = tuple(as_images(frames))
        if len(refs) < FRAMES_PER_PAIR:
            raise InvalidParameterError("frames", f"must be at least {FRAMES_PER_PAIR}; send one frame as an image")
        if any(ref.max_pixels is not None or ref.beside_others for ref in refs):
            raise InvalidParameterError("frames", "must have no options of their own; set max_pixels of the video")
        if size is None and any(ref.data is None for ref in refs):
            raise InvalidParameterError("size", "is needed if a frame is given by its digest")
        return cls(refs, fps, max_pixels, size)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of frames; an odd last frame is paired with itself."""
        return self.num_entries(FRAMES_PER_PAIR)

    def num_entries(self, frames_per_entry: int) -> int:
        """Number of cache entries of the video, for a model with this `model_info().frames_per_entry`."""
        return -(-len(self.frames) // frames_per_entry)


def _is_pair(size: object) -> bool:
    return (
        isinstance(size, tuple | list)
        and len(size) == 2
        and all(isinstance(side, numbers.Integral) and not isinstance(side, bool) for side in size)
    )
