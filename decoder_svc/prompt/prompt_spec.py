"""A prompt as the caller sent it: messages, text or token ids, with unresolved image sources. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from decoder_svc.tools.tool import Tool, ToolCall, ToolChoice, ToolMode
from lookonce.content_key import ImageDigest, ProcessorOptions
from lookonce.image_file import ImageFile, num_file_bytes
from lookonce.media.image_header import ImageHeader

_ANY_TOOL = ToolChoice()


class ChatRole(enum.Enum):
    """The author of a message. The values are the role names that chat templates use."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Digest and header of an image file, or of a pair of video frames."""

    # SHA-256 of the file; of a pair, the digest that names its rows.
    digest: ImageDigest
    # The header of a pair is the first frame's, with the pixels of the frame that costs more.
    header: ImageHeader


@dataclass(frozen=True, slots=True)
class InlineImage:
    """An image, or a pair of video frames, contained in the request."""

    # The original file.
    data: ImageFile = field(repr=False)
    options: ProcessorOptions
    # The digest that `data` must have; None: not checked.
    expected_digest: ImageDigest | None = None
    # Set if the files were read and their digests compared already, as those of video frames are.
    facts: FileFacts | None = None


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image referenced by its digest."""

    digest: ImageDigest
    options: ProcessorOptions
    # Encoder whose rows the caller expects; None: any.
    fingerprint: str | None = None


ImageSource: TypeAlias = InlineImage | CachedImage


@dataclass(frozen=True, slots=True)
class VideoFrame:
    """One frame: its bytes or its digest, or both."""

    # The original file; None for a reference by digest.
    data: bytes | None = field(repr=False)
    # SHA-256 of the frame. Required without `data`; with it, the digest that `data` must have.
    digest: ImageDigest | None = None
    # Encoder whose rows the caller expects; None: any.
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video, given as frames that the caller sampled from it."""

    # At least 2, in order.
    frames: tuple[VideoFrame, ...]
    # Frames per second of the video.
    fps: float
    # Most pixels of a frame after resizing; None: the model's default.
    max_pixels: int | None = None
    # Width and height of the frames; None: read from their headers.
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text in a message. Control tokens spelled in it are plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message."""

    source: ImageSource


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A video in a message."""

    source: VideoSource


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: ChatRole
    # In reading order.
    parts: tuple[TextPart | ImagePart | VideoPart, ...]
    # Calls of the assistant.
    calls: tuple[ToolCall, ...] = ()
    # With TOOL, the id of the call whose result this is.
    call_id: str = ""
    # Reasoning of the assistant.
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered by the model's own chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = _ANY_TOOL
    # Arguments of the template: a JSON object, as text; empty: none.
    template_arguments: str = ""

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The functions that the model sees."""
        return () if self.tool_choice.mode is ToolMode.NONE else self.tools

    @property
    def visuals(self) -> tuple[ImageSource | VideoSource, ...]:
        """The images and videos in reading order."""
        parts = (part for message in self.messages for part in message.parts)
        return tuple(part.source for part in parts if not isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """The images in reading order."""
        return tuple(source for source in self.visuals if not isinstance(source, VideoSource))

    @property
    def videos(self) -> tuple[VideoSource, ...]:
        """The videos of the conversation, in reading order."""
        return tuple(source for source in self.visuals if isinstance(source, VideoSource))


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt rendered by the caller. Control tokens spelled in its text become control tokens."""

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
    """Returns the bytes of all image files in the prompt, including video frames."""
    videos = spec.videos if isinstance(spec, ChatPrompt) else ()
    frames = sum(len(frame.data or b"") for video in videos for frame in video.frames)
    return frames + sum(num_file_bytes(source.data) for source in spec.images if isinstance(source, InlineImage))


def texts_of(chat: ChatPrompt) -> Iterator[str]:
    """Yields all texts of a conversation and of its functions."""
    for tool in chat.tools:
        yield from (tool.name, tool.description, tool.parameters)
    for message in chat.messages:
        yield from (part.text for part in message.parts if isinstance(part, TextPart))
        yield from (call.arguments for call in message.calls)
        yield message.reasoning
    yield chat.template_arguments
