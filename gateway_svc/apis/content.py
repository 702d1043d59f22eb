"""The content of messages: texts, and images as data URLs or addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from gateway_svc.apis.fields import Fields
from lookonce.errors import ImageCountError, InvalidParameterError
from lookonce.generation import Message, Role
from lookonce.images import ImageRef, as_image

# For `detail: low`: about the size to which OpenAI shrinks such images.
LOW_DETAIL_PIXELS = 512 * 512
# Limits on all answers to one request together: building that many requests holds up other callers.
MAX_PARTS = 4096
MAX_CHARACTERS = 8 << 20
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image that must be fetched."""

    url: str
    max_pixels: int | None
    # Its place in the request, for errors.
    where: str = field(compare=False)


Part: TypeAlias = "str | ImageRef | RemoteImage"


@dataclass(frozen=True, slots=True)
class Turn:
    """A message whose images may still have to be fetched."""

    role: Role
    parts: Sequence[Part]
    # Its place in the request, for errors.
    where: str = ""


def role_of(fields: Fields) -> Role:
    """Returns the author of a message. Raises InvalidParameterError for roles that are not served."""
    name = fields.needed("role", fields.text("role"))
    if name not in ROLES:
        raise fields.wrong("role", f"must be one of {', '.join(ROLES)}")
    return ROLES[name]


def turn_of(fields: Fields, role: Role, where: str, part_of: Callable[[Any, str, int], Part]) -> Turn:
    """Returns a message whose `content` is a text or a list of parts, each of which `part_of` parses."""
    content = fields.raw("content")
    if isinstance(content, str):
        return Turn(role, [content], where)
    if not isinstance(content, list):
        raise fields.wrong("content", "must be a text or a list of parts")
    return Turn(role, [part_of(part, where, index) for index, part in enumerate(content)], where)


def image_part(fields: Fields, url: str, detail: str | None, max_pixels: int | None) -> Part:
    """Returns an image by its URL. Raises InvalidParameterError."""
    if detail not in (None, "auto", "low", "high", "original"):
        raise fields.wrong("detail", "must be auto, low, high or original")
    if max_pixels is None and detail == "low":
        max_pixels = LOW_DETAIL_PIXELS
    if url[:5].lower() == "data:":
        try:
            return replace(as_image(url), max_pixels=max_pixels)
        except InvalidParameterError as error:
            raise fields.wrong("url", error.description.removeprefix("one ")) from None
    if not url[:8].lower().startswith(("http://", "https://")):
        # A path would be one of this machine.
        raise fields.wrong("url", "must be a data URL with an image in base64, or begin with http:// or https://")
    return RemoteImage(url, max_pixels, fields.where)


def check_size(turns: Sequence[Turn], num_each: int, fields: Fields, name: str) -> None:
    """Raises InvalidParameterError for more messages, parts and text than all answers together may have.

    Each answer is a request of its own to the decoder, which has such limits too.
    """
    num_parts = sum(1 + len(turn.parts) for turn in turns)
    if num_parts * num_each > MAX_PARTS:
        raise fields.wrong(name, f"has {num_parts} messages and parts; times n, the limit is {MAX_PARTS}")
    num_characters = sum(len(part) for turn in turns for part in turn.parts if isinstance(part, str))
    if num_characters * num_each > MAX_CHARACTERS:
        raise fields.wrong(name, f"has {num_characters} characters; times n, the limit is {MAX_CHARACTERS}")


def image_places(turns: Sequence[Turn]) -> list[str]:
    """Returns the place of each image in the request, in the order of the prompt."""
    return [
        f"{turn.where}.content[{index}]"
        for turn in turns
        for index, part in enumerate(turn.parts)
        if not isinstance(part, str)
    ]


def remote_images(turns: Sequence[Turn]) -> list[RemoteImage]:
    """Returns the images that must be fetched, each once."""
    return list(dict.fromkeys(part for turn in turns for part in turn.parts if isinstance(part, RemoteImage)))


async def with_images(
    turns: Sequence[Turn], fetch: Callable[[str], Awaitable[ImageRef]], max_images: int
) -> list[Message]:
    """Fetches the images that must be. Raises ImageCountError for more images than a prompt may have."""
    num_images = sum(not isinstance(part, str) for turn in turns for part in turn.parts)
    if num_images > max_images:
        raise ImageCountError(f"the prompt has {num_images} images, the limit is {max_images}")
    remote = remote_images(turns)
    tasks = [asyncio.ensure_future(_fetched(image, fetch)) for image in remote]
    try:
        found = dict(zip(remote, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def fetched(part: Part) -> str | ImageRef:
        return replace(found[part], max_pixels=part.max_pixels) if isinstance(part, RemoteImage) else part

    return [Message(turn.role, [fetched(part) for part in turn.parts]) for turn in turns]


async def _fetched(image: RemoteImage, fetch: Callable[[str], Awaitable[ImageRef]]) -> ImageRef:
    try:
        return await fetch(image.url)
    except InvalidParameterError as error:
        raise InvalidParameterError(image.where, error.description) from None


def part_fields(value: Any, where: str, index: int) -> Fields:
    """Returns the fields of one part of a message."""
    return Fields.of(value, f"{where}.content[{index}]")
