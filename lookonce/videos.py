"""Videos as a caller of the SDK names them: the frames that were sampled from one. No pixels, no gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lookonce.errors import InvalidParameterError
from lookonce.image_file import FRAMES_PER_PAIR
from lookonce.images import ImageLike, ImageRef, as_images


@dataclass(frozen=True, slots=True)
class Video:
    """A video for a chat with a model that takes them (`model_info().max_video_frames`).

    Where the server lacks a frame, all of the video's travel in one message: MessageTooLargeError when they do not fit
    (`model_info().max_message_bytes`).
    """

    # In order, of one size in pixels, sampled evenly.
    frames: tuple[ImageRef, ...]
    # Frames per second of the video, 0.001 to 1000. None: the server's default, 2.
    fps: float | None = None
    # Upper bound of a frame's pixels after resizing. None: the model's default.
    max_pixels: int | None = None
    # Width and height of the frames in pixels. Where it is stated, frames travel by digest first, as images do; else
    # their bytes travel every time.
    size: tuple[int, int] | None = None

    @classmethod
    def from_frames(
        cls,
        frames: Sequence[ImageLike],
        *,
        fps: float | None = None,
        max_pixels: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> Self:
        """Image files as references, bytes or paths; reads and hashes them.

        Raises OSError when one cannot be read, and InvalidParameterError for less than two frames, frames with options
        of their own, or frames by digest without a `size`.
        """
        refs = tuple(as_images(frames))
        if len(refs) < FRAMES_PER_PAIR:
            raise InvalidParameterError("frames", f"must be at least {FRAMES_PER_PAIR}; a single one is an image")
        if any(ref.max_pixels is not None or ref.beside_others for ref in refs):
            raise InvalidParameterError("frames", "must have no options of their own; max_pixels is the video's")
        if size is None and any(ref.data is None for ref in refs):
            raise InvalidParameterError("size", "is needed where a frame is given by its digest")
        return cls(refs, fps, max_pixels, size)

    @property
    def num_pairs(self) -> int:
        """Entries of the cache that it takes; a last odd frame makes a pair with itself."""
        return -(-len(self.frames) // FRAMES_PER_PAIR)
