"""A prompt as a caller states it: messages, text or token ids with image sources. Plain data, nothing is resolved."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from lookonce.content_key import ImageDigest, ProcessorOptions
from lookonce.image_file import ImageFile, num_file_bytes


class ChatRole(enum.Enum):
    """Who says a message; the values are the words that chat templates know."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class InlineImage:
    """An image, or a pair of video frames, that came with the request."""

    # The original file.
    data: ImageFile = field(repr=False)
    options: ProcessorOptions
    # The digest that `data` must have; None: not stated.
    expected_digest: ImageDigest | None = None


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image that is referred to by its digest."""

    digest: ImageDigest
    options: ProcessorOptions
    # Encoder that the caller wants the rows of; None: the one served here.
    fingerprint: str | None = None


ImageSource: TypeAlias = InlineImage | CachedImage


@dataclass(frozen=True, slots=True)
class VideoFrame:
    """One frame: its bytes or its digest, or both."""

    # The original file; None: by digest only.
    data: bytes | None = field(repr=False)
    # SHA-256 that `data` must have, or by which the frame is known.
    digest: ImageDigest | None = None
    # Encoder that the caller wants the rows of; None: the one served here.
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video as the frames that were sampled from it."""

    # At least 2, in order.
    frames: tuple[VideoFrame, ...]
    # Frames per second of the video.
    fps: float
    # Upper bound of a frame's pixels after resizing; None: the model's default.
    max_pixels: int | None = None
    # Width and height of the frames; None: as their bytes say.
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a message. It is data: control tokens spelled in it are plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a message."""

    source: ImageSource


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A video of a message."""

    source: VideoSource


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn."""

    role: ChatRole
    # In reading order.
    parts: tuple[TextPart | ImagePart | VideoPart, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's own chat template."""

    messages: tuple[ChatMessage, ...]

    @property
    def visuals(self) -> tuple[ImageSource | VideoSource, ...]:
        """Images and videos in reading order."""
        parts = (part for message in self.messages for part in message.parts)
        return tuple(part.source for part in parts if not isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """Sources in reading order."""
        return tuple(source for source in self.visuals if not isinstance(source, VideoSource))

    @property
    def videos(self) -> tuple[VideoSource, ...]:
        """Videos in reading order."""
        return tuple(source for source in self.visuals if isinstance(source, VideoSource))


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A rendered prompt. The caller did the template's work, so control tokens spelled in the text count."""

    text: str
    # One per placeholder, in order.
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids with one placeholder id per image, or with every placeholder already expanded."""

    token_ids: tuple[int, ...]
    # In placeholder order.
    images: tuple[ImageSource, ...] = ()


PromptSpec: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt


def num_inline_bytes(spec: PromptSpec) -> int:
    """Bytes of all image files that came with the prompt, frames of videos included."""
    videos = spec.videos if isinstance(spec, ChatPrompt) else ()
    frames = sum(len(frame.data or b"") for video in videos for frame in video.frames)
    return frames + sum(num_file_bytes(source.data) for source in spec.images if isinstance(source, InlineImage))
