"""A prompt as a caller states it: messages, text or token ids with image sources. Plain data, nothing is resolved."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from lookonce.content_key import ImageDigest, ProcessorOptions


class Role(enum.Enum):
    """Who says a message; the values are the words that chat templates know."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class InlineImage:
    """An image that came with the request."""

    # The original file.
    data: bytes = field(repr=False)
    options: ProcessorOptions
    # SHA-256 that `data` must have; None: not stated.
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
class TextPart:
    """Text of a message. It is data: control tokens spelled in it are plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a message."""

    source: ImageSource


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn."""

    role: Role
    # In reading order.
    parts: tuple[TextPart | ImagePart, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's own chat template."""

    messages: tuple[ChatMessage, ...]

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """Sources in reading order."""
        parts = (part for message in self.messages for part in message.parts)
        return tuple(part.source for part in parts if isinstance(part, ImagePart))


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
