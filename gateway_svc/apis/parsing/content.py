"""The content of messages: texts, and images as data URLs or addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from gateway_svc.apis.parsing.fields import Fields
from lookonce.errors import ImageCountError, InvalidParameterError
from lookonce.generation import Message, Role, Tool, ToolCall
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
class Content:
    """Parts of a message in reading order."""

    parts: Sequence[Part] = ()
    # The place of each part in the request, for errors.
    places: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A message whose images may still have to be fetched."""

    role: Role
    content: Content
    # Its place in the request, for errors.
    where: str
    # With the role "assistant": calls of functions, the place of each in the request, and reasoning.
    calls: Sequence[ToolCall] = ()
    call_places: Sequence[str] = ()
    reasoning: str = ""
    # With the role "tool": the id of the call whose result this is.
    call_id: str = ""

    @classmethod
    def of_text(cls, role: Role, text: str, where: str) -> Turn:
        """Returns a message of one text."""
        return cls(role, Content([text], [where]), where)


def role_of(fields: Fields, roles: Mapping[str, Role]) -> Role:
    """Returns the author of a message. Raises InvalidParameterError for roles that are not served."""
    name = fields.needed("role", fields.text("role"))
    if name not in roles:
        raise fields.wrong("role", f"must be one of {', '.join(roles)}")
    return roles[name]


def content_of(fields: Fields, name: str, part_of: Callable[[Fields], Part]) -> Content:
    """Returns a field that is a text or a list of parts, each of which `part_of` parses."""
    value = fields.raw(name)
    if isinstance(value, str):
        return Content([value], [fields.place(name)])
    if not isinstance(value, list):
        raise fields.wrong(name, "must be a text or a list of parts")
    places = [f"{fields.place(name)}[{index}]" for index in range(len(value))]
    return Content([part_of(Fields.of(part, where)) for part, where in zip(value, places, strict=True)], places)


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


def check_size(turns: Sequence[Turn], tools: Sequence[Tool], num_each: int, fields: Fields, name: str) -> None:
    """Raises InvalidParameterError for more messages, parts and text than all answers together may have.

    Each answer is a request of its own to the decoder, which has such limits too.
    """
    times_n = "times n, " if num_each > 1 else ""
    num_parts = sum(1 + len(turn.content.parts) + len(turn.calls) for turn in turns)
    if num_parts * num_each > MAX_PARTS:
        raise fields.wrong(name, f"has {num_parts} messages and parts; {times_n}the limit is {MAX_PARTS}")
    num_characters = sum(map(len, _texts(turns, tools)))
    if num_characters * num_each > MAX_CHARACTERS:
        raise fields.wrong(name, f"has {num_characters} characters; {times_n}the limit is {MAX_CHARACTERS}")


def _texts(turns: Sequence[Turn], tools: Sequence[Tool]) -> Iterator[str]:
    for tool in tools:
        yield tool.description
        if isinstance(tool.parameters, str):
            yield tool.parameters
    for turn in turns:
        yield from (part for part in turn.content.parts if isinstance(part, str))
        yield from (call.arguments for call in turn.calls)
        yield turn.reasoning


def places_of(turns: Sequence[Turn]) -> dict[str, str]:
    """Returns the place in the request of each message, part, call and image, by the decoder's name for it."""
    places: dict[str, str] = {}
    image_places: list[str] = []
    for index, turn in enumerate(turns):
        name = f"chat.messages[{index}]"
        places[name] = turn.where
        places |= {f"{name}.tool_calls[{number}]": place for number, place in enumerate(turn.call_places)}
        for number, (part, place) in enumerate(zip(turn.content.parts, turn.content.places, strict=True)):
            places[f"{name}.parts[{number}]"] = place
            if not isinstance(part, str):
                image_places.append(place)
    return places | {f"images[{index}]": place for index, place in enumerate(image_places)}


def remote_images(turns: Sequence[Turn]) -> list[RemoteImage]:
    """Returns the images that must be fetched, each once."""
    return list(dict.fromkeys(part for turn in turns for part in turn.content.parts if isinstance(part, RemoteImage)))


async def with_images(
    turns: Sequence[Turn], fetch: Callable[[str], Awaitable[ImageRef]], max_images: int
) -> list[Message]:
    """Fetches the images that must be. Raises ImageCountError for more images than a prompt may have."""
    num_images = sum(not isinstance(part, str) for turn in turns for part in turn.content.parts)
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

    return [
        Message(
            turn.role,
            [fetched(part) for part in turn.content.parts],
            tool_calls=turn.calls,
            reasoning=turn.reasoning,
            tool_call_id=turn.call_id,
        )
        for turn in turns
    ]


async def _fetched(image: RemoteImage, fetch: Callable[[str], Awaitable[ImageRef]]) -> ImageRef:
    try:
        return await fetch(image.url)
    except InvalidParameterError as error:
        raise InvalidParameterError(image.where, error.description) from None
