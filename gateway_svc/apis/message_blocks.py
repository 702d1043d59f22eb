"""Parses the messages of Anthropic's interface, whose content is blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gateway_svc.apis.parsing.content import Content, Part, Turn, content_of, image_part, role_of
from gateway_svc.apis.parsing.fields import Fields
from lookonce.generation import Role, ToolCall

BLOCKS_NOTE = (
    "Roles user and assistant. Blocks are `text` and `image`, with a source `base64` or `url`. A user's message may "
    "have `tool_result`, whose content is a text or such blocks; images in it need a chat template that takes them, "
    "and `is_error` has no effect. An assistant's message may have `tool_use`, and `thinking`, whose `signature` has "
    "no effect; its texts stand before its calls. `cache_control` of a block has no effect."
)

_ROLES: Mapping[str, Role] = {"user": "user", "assistant": "assistant"}
_CACHE = "cache_control"


def message_turns(fields: Fields) -> list[Turn]:
    """Returns the messages of a request, with its instructions. Raises InvalidParameterError."""
    messages = fields.needed("messages", fields.array("messages"))
    if not messages:
        raise fields.wrong("messages", "is empty")
    turns = [] if fields.raw("system") is None else [Turn("system", content_of(fields, "system", _text), "system")]
    for index, message in enumerate(messages):
        given = Fields.of(message, f"messages[{index}]").only("role", "content")
        turns += _answer(given) if role_of(given, _ROLES) == "assistant" else _question(given)
    return turns


@dataclass(slots=True)
class _Growing:
    """Parts of a message that are collected one by one."""

    parts: list[Part] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, part: Part, block: Fields) -> None:
        """Adds a part, whose place is that of its block."""
        self.parts.append(part)
        self.places.append(block.where)

    @property
    def content(self) -> Content:
        """The parts that were added so far, with their places."""
        return Content(self.parts, self.places)


def _blocks(fields: Fields) -> list[Fields] | None:
    """Returns the blocks of a message; None for a text."""
    value = fields.raw("content")
    if isinstance(value, str):
        return None
    if not isinstance(value, list):
        raise fields.wrong("content", "must be a text or a list of blocks")
    return [Fields.of(block, f"{fields.place('content')}[{index}]") for index, block in enumerate(value)]


def _question(fields: Fields) -> Iterator[Turn]:
    """Yields a message of the user: results of functions are messages of their own."""
    blocks = _blocks(fields)
    if not blocks:
        yield Turn("user", content_of(fields, "content", _part), fields.where)
        return
    growing = _Growing()
    for block in blocks:
        if block.text("type") != "tool_result":
            growing.add(_part(block), block)
            continue
        if growing.parts:
            yield Turn("user", growing.content, fields.where)
            growing = _Growing()
        yield _result(block)
    if growing.parts:
        yield Turn("user", growing.content, fields.where)


def _result(block: Fields) -> Turn:
    block.only("type", "tool_use_id", "content", "is_error", _CACHE).flag("is_error")
    is_empty = block.raw("content") is None
    content = Content([""], [block.where]) if is_empty else content_of(block, "content", _part)
    return Turn("tool", content, block.where, call_id=block.needed("tool_use_id", block.text("tool_use_id")))


def _answer(fields: Fields) -> Iterator[Turn]:
    """Yields a message of the assistant."""
    blocks = _blocks(fields)
    if not blocks:
        yield Turn("assistant", content_of(fields, "content", _part), fields.where)
        return
    growing, calls, places, reasoning = _Growing(), [], [], []
    for block in blocks:
        match block.text("type"):
            case "tool_use":
                calls.append(_call(block))
                places.append(block.where)
            case "thinking":
                block.only("type", "thinking", "signature")
                reasoning.append(block.needed("thinking", block.text("thinking")))
            case _:
                growing.add(_part(block), block)
    if not growing.parts and not calls:
        # An answer that was cut off in its reasoning.
        growing.add("", blocks[0])
    yield Turn("assistant", growing.content, fields.where, calls, places, "\n".join(reasoning))


def _call(block: Fields) -> ToolCall:
    block.only("type", "id", "name", "input", _CACHE)
    given = block.raw("input")
    if not isinstance(given, dict):
        raise block.wrong("input", "must be an object")
    try:
        arguments = json.dumps(given, allow_nan=False)
    except (ValueError, RecursionError):
        raise block.wrong("input", "is no JSON") from None
    return ToolCall(block.needed("id", block.text("id")), block.needed("name", block.text("name")), arguments)


def _text(block: Fields) -> Part:
    if block.text("type") != "text":
        raise block.wrong("type", "must be text")
    return block.only("type", "text", _CACHE).needed("text", block.text("text"))


def _part(block: Fields) -> Part:
    kind = block.text("type")
    if kind == "text":
        return _text(block)
    if kind != "image":
        raise block.wrong("type", f"{(kind or 'none')[:100]} is not served here")
    source = block.only("type", "source", _CACHE).inner("source")
    if source.text("type") == "base64":
        source.only("type", "media_type", "data")
        data = source.needed("data", source.text("data"))
        return image_part(source, f"data:{source.text('media_type') or ''};base64,{data}", None, None)
    if source.text("type") != "url":
        raise source.wrong("type", "must be base64 or url")
    source.only("type", "url")
    return image_part(source, source.needed("url", source.text("url")), None, None)
