"""Splits videos into pairs of frames or single ones: an image source and a layout for each. Decodes no pixels.

The frames are read before, one at a time: those of one request may keep a processor busy for seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from decoder_svc.prompt.family import DecoderFamily
from decoder_svc.prompt.image_layout import ImageLayout
from decoder_svc.prompt.prompt_spec import CachedImage, FileFacts, ImageSource, InlineImage, VideoFrame, VideoSource
from lookonce.content_key import ImageDigest, ProcessorOptions, image_digest, pair_digest
from lookonce.errors import (
    DigestMismatchError,
    FingerprintMismatchError,
    InvalidParameterError,
    located_in_image,
)
from lookonce.image_file import FramePair
from lookonce.media.image_header import ImageHeader, ImageLimits, check_one_size, probe_image


@dataclass(frozen=True, slots=True)
class SplitVideo:
    """A video's entries of the cache in order: pairs of frames, or single ones."""

    sources: tuple[ImageSource, ...]
    layouts: tuple[ImageLayout, ...]
    # Width and height of the frames: those of the headers, or those that the request states.
    size: tuple[int, int]


class VideoSplitter:
    """Splits the videos of prompts for one model; safe to use from several threads at once."""

    def __init__(self, family: DecoderFamily, limits: ImageLimits) -> None:
        self._family = family
        self._limits = limits

    def read(self, data: bytes) -> FileFacts:
        """Hashes one frame and reads its header. Raises the errors of `probe_image`."""
        header = probe_image(data, self._limits)
        return FileFacts(image_digest(data), header)

    def split_all(
        self, visuals: Sequence[ImageSource | VideoSource], facts: Sequence[FileFacts | None]
    ) -> list[SplitVideo]:
        """Splits all videos among a prompt's images and videos. Raises the errors of `split`.

        `facts` has an entry for each frame of `frames_of`.
        """
        videos: list[SplitVideo] = []
        upcoming = iter(facts)
        index = 0
        for visual in visuals:
            if isinstance(visual, VideoSource):
                try:
                    videos.append(self.split(visual, index, list(itertools.islice(upcoming, len(visual.frames)))))
                except InvalidParameterError as error:
                    raise InvalidParameterError(f"videos[{len(videos)}].{error.field}", error.description) from None
                index += len(videos[-1].sources)
            else:
                index += 1
        return videos

    def frames_of(self, visuals: Sequence[ImageSource | VideoSource]) -> Iterator[tuple[int, VideoFrame]]:
        """Yields the frames of all videos in order, each with the index of its entry among the image sources."""
        # A model without videos refuses them later.
        step = max(1, self._family.frames_per_entry)
        index = 0
        for visual in visuals:
            if isinstance(visual, VideoSource):
                for number, frame in enumerate(visual.frames):
                    yield index + number // step, frame
                index += -(-len(visual.frames) // step)
            else:
                index += 1

    def split(self, video: VideoSource, first_index: int, facts: Sequence[FileFacts | None]) -> SplitVideo:
        """Splits one video, whose first entry is image source `first_index` of the prompt.

        `facts` has the result of `read` for each frame; None for a frame by its digest. Takes milliseconds, so do not
        call it on an event loop. Raises DigestMismatchError and FingerprintMismatchError (with the entry's index in the
        metadata), InvalidParameterError for frames of different sizes, an unknown or wrong size, or a
        `max_pixels` that cannot be met, and ImageTooLargeError for frames that the model does not support.
        """
        width, height = _size(video, [one.header for one in facts if one is not None])
        with located_in_image(first_index):
            frame_size = self._family.frame_size(width, height, len(video.frames), video.max_pixels)
        layouts = self._family.video_layouts(frame_size, len(video.frames), video.fps)
        options = ProcessorOptions(frame_size=frame_size)
        sources = []
        step = self._family.frames_per_entry
        for start in range(0, len(video.frames), step):
            entry = slice(start, start + step)
            with located_in_image(first_index + start // step):
                sources.append(_entry(video.frames[entry], facts[entry], options))
        return SplitVideo(tuple(sources), tuple(layouts), (width, height))


def check_sizes(videos: Sequence[SplitVideo], entry_sizes: Iterable[tuple[int, int]]) -> None:
    """Raises InvalidParameterError for a video that states another size than its frames have according to the cache.

    `entry_sizes` has the width and height of the frames of each entry, over all videos in order.
    """
    remaining = iter(entry_sizes)
    for number, video in enumerate(videos):
        for found in itertools.islice(remaining, len(video.sources)):
            if found != video.size:
                raise _wrong_size(f"videos[{number}].size", video.size, found)


def _size(video: VideoSource, headers: Sequence[ImageHeader]) -> tuple[int, int]:
    """Returns the common size of the frames in pixels. `headers` are those of the frames given by their bytes."""
    check_one_size(headers, "frames")
    if video.size is None:
        if len(headers) < len(video.frames):
            raise InvalidParameterError("size", "is required if a frame is given by its key")
        return headers[0].width, headers[0].height
    width, height = video.size
    if headers and (headers[0].width, headers[0].height) != video.size:
        raise _wrong_size("size", video.size, (headers[0].width, headers[0].height))
    return width, height


def _wrong_size(field: str, stated: tuple[int, int], found: tuple[int, int]) -> InvalidParameterError:
    return InvalidParameterError(field, f"is {stated[0]}×{stated[1]}, but the frames have {found[0]}×{found[1]} pixels")


def _entry(frames: Sequence[VideoFrame], facts: Sequence[FileFacts | None], options: ProcessorOptions) -> ImageSource:
    """Returns a pair of frames, or a single one, as inline data if all bytes are present.

    Otherwise returns a reference to the cache. Raises DigestMismatchError, and FingerprintMismatchError if the frames
    name different encoders.
    """
    digests = [_digest(frame, known) for frame, known in zip(frames, facts, strict=True)]
    digest = pair_digest(digests[0], digests[-1])
    files = [frame.data for frame in frames if frame.data is not None]
    headers = [known.header for known in facts if known is not None]
    if len(files) == len(frames):
        header = replace(headers[0], num_decoded_pixels=max(header.num_pixels for header in headers))
        data = FramePair(files[0], files[1] if len(files) > 1 else None)
        return InlineImage(data, options, facts=FileFacts(digest, header))
    fingerprints = {frame.fingerprint for frame in frames if frame.fingerprint is not None}
    if len(fingerprints) > 1:
        raise FingerprintMismatchError("two frames name different encoder fingerprints; leave them empty")
    return CachedImage(digest, options, next(iter(fingerprints), None))


def _digest(frame: VideoFrame, facts: FileFacts | None) -> ImageDigest:
    """Returns a frame's digest. Raises DigestMismatchError if its bytes do not match the expected digest."""
    if facts is None:
        assert frame.digest is not None, "a frame has bytes or a digest"
        return frame.digest
    if frame.digest not in (None, facts.digest):
        raise DigestMismatchError("a frame's bytes do not hash to its expected_digest; send them again")
    return facts.digest
