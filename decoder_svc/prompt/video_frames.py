"""Splits videos into pairs of frames: an image source and a layout for each pair. Reads the frames' headers only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decoder_svc.prompt.family import DecoderFamily
from decoder_svc.prompt.image_layout import ImageLayout
from decoder_svc.prompt.prompt_spec import CachedImage, ImageSource, InlineImage, VideoFrame, VideoSource
from lookonce.content_key import ImageDigest, ProcessorOptions, image_digest, pair_digest
from lookonce.errors import (
    DigestMismatchError,
    FingerprintMismatchError,
    InvalidParameterError,
    located_in_image,
)
from lookonce.image_file import FRAMES_PER_PAIR, FramePair
from lookonce.media.image_header import ImageLimits, check_one_size, probe_image


@dataclass(frozen=True, slots=True)
class SplitVideo:
    """A video's frame pairs in order."""

    sources: tuple[ImageSource, ...]
    layouts: tuple[ImageLayout, ...]
    # Width and height of the frames: those of the headers, or those that the request states.
    size: tuple[int, int]


class VideoSplitter:
    """Splits the videos of prompts for one model; safe to use from several threads at once."""

    def __init__(self, family: DecoderFamily, limits: ImageLimits) -> None:
        self._family = family
        self._limits = limits

    def split_all(self, visuals: Sequence[ImageSource | VideoSource]) -> list[SplitVideo]:
        """Splits all videos among a prompt's images and videos. Raises the errors of `split`."""
        videos: list[SplitVideo] = []
        index = 0
        for visual in visuals:
            if isinstance(visual, VideoSource):
                try:
                    videos.append(self.split(visual, index))
                except InvalidParameterError as error:
                    raise InvalidParameterError(f"videos[{len(videos)}].{error.field}", error.description) from None
                index += len(videos[-1].sources)
            else:
                index += 1
        return videos

    def split(self, video: VideoSource, first_index: int) -> SplitVideo:
        """Splits one video, whose first pair is image source `first_index` of the prompt.

        Takes milliseconds, so do not call it on an event loop. Raises the error of a bad frame (with its pair's index
        in the metadata), InvalidParameterError for frames of different sizes, an unknown or wrong size, or a
        `max_pixels` that cannot be met, and ImageTooLargeError for frames that the model does not support.
        """
        width, height = self._size(video, first_index)
        with located_in_image(first_index):
            frame_size = self._family.frame_size(width, height, len(video.frames), video.max_pixels)
        layouts = self._family.video_layouts(frame_size, len(video.frames), video.fps)
        options = ProcessorOptions(frame_size=frame_size)
        sources = []
        for start in range(0, len(video.frames), FRAMES_PER_PAIR):
            first, *others = video.frames[start : start + FRAMES_PER_PAIR]
            with located_in_image(first_index + start // FRAMES_PER_PAIR):
                sources.append(_pair(first, others[0] if others else None, options))
        return SplitVideo(tuple(sources), tuple(layouts), (width, height))

    def _size(self, video: VideoSource, first_index: int) -> tuple[int, int]:
        """Returns the common size of the frames in pixels."""
        headers = []
        for number, frame in enumerate(video.frames):
            if frame.data is not None:
                with located_in_image(first_index + number // FRAMES_PER_PAIR):
                    headers.append(probe_image(frame.data, self._limits))
        check_one_size(headers, "frames")
        if video.size is None:
            if len(headers) < len(video.frames):
                raise InvalidParameterError("size", "is required if a frame is given by its key")
            return headers[0].width, headers[0].height
        width, height = video.size
        if headers and (headers[0].width, headers[0].height) != video.size:
            raise _wrong_size("size", video.size, (headers[0].width, headers[0].height))
        return width, height


def check_sizes(videos: Sequence[SplitVideo], pair_sizes: Iterable[tuple[int, int]]) -> None:
    """Raises InvalidParameterError for a video that states another size than its frames have according to the cache.

    `pair_sizes` has the width and height of the frames of each pair, over all videos in order.
    """
    remaining = iter(pair_sizes)
    for number, video in enumerate(videos):
        for found in itertools.islice(remaining, len(video.sources)):
            if found != video.size:
                raise _wrong_size(f"videos[{number}].size", video.size, found)


def _wrong_size(field: str, stated: tuple[int, int], found: tuple[int, int]) -> InvalidParameterError:
    return InvalidParameterError(field, f"is {stated[0]}×{stated[1]}, but the frames have {found[0]}×{found[1]} pixels")


def _pair(first: VideoFrame, second: VideoFrame | None, options: ProcessorOptions) -> ImageSource:
    """Returns the pair as inline data if all bytes are present, else as a reference to the cache.

    Raises DigestMismatchError, and FingerprintMismatchError if the frames name different encoders.
    """
    frames = [first] if second is None else [first, second]
    files = [frame.data for frame in frames if frame.data is not None]
    if len(files) == len(frames):
        return InlineImage(FramePair(files[0], files[1] if second else None), options, _stated(frames))
    fingerprints = {frame.fingerprint for frame in frames if frame.fingerprint is not None}
    if len(fingerprints) > 1:
        raise FingerprintMismatchError("two frames name different encoder fingerprints; leave them empty")
    digests = [_digest(frame) for frame in frames]
    return CachedImage(pair_digest(digests[0], digests[-1]), options, next(iter(fingerprints), None))


def _stated(frames: Sequence[VideoFrame]) -> ImageDigest | None:
    """Returns the digest that the pair must have, or None. The image resolver hashes the files and compares."""
    if all(frame.digest is None for frame in frames):
        return None
    digests = [frame.digest or _digest(frame) for frame in frames]
    return pair_digest(digests[0], digests[-1])


def _digest(frame: VideoFrame) -> ImageDigest:
    """Returns a frame's digest. Raises DigestMismatchError if its bytes do not match the expected digest."""
    if frame.data is None:
        assert frame.digest is not None, "a frame has bytes or a digest"
        return frame.digest
    digest = image_digest(frame.data)
    if frame.digest not in (None, digest):
        raise DigestMismatchError("a frame's bytes do not hash to its expected_digest; send them again")
    return digest
