"""Parses the messages of chat completions: texts, images, calls of functions and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.apis.parsing.content import ROLES, Content, Part, Turn, content_of, image_part, role_of
from gateway_svc.apis.parsing.fields import Fields
from lookonce.generation import Role, ToolCall

MESSAGES_NOTE = (
    "Roles system, developer (as system), user, assistant and tool. Parts `text` and `image_url`, with a data URL or "
    "an address, and `detail`: `low` means at most 262,144 pixels, and is refused by models with images of one size. "
    "The role tool has texts alone. The assistant may have `tool_calls`, and reasoning in `reasoning_content` or "
    "`reasoning`, which many chat templates leave out."
)

_CHAT_ROLES: Mapping[str, Role] = {**ROLES, "tool": "tool"}


def chat_turns(fields: Fields) -> list[Turn]:
    """Returns the messages of a request. Raises InvalidParameterError for what is not served."""
    messages = fields.needed("messages", fields.array("messages"))
    if not messages:
        raise fields.wrong("messages", "is empty")
    return [_turn(Fields.of(message, f"messages[{index}]")) for index, message in enumerate(messages)]


def _turn(fields: Fields) -> Turn:
    role = role_of(fields, _CHAT_ROLES)
    if role == "assistant":
        return _answer(fields)
    if role == "tool":
        return _result(fields)
    fields.only("role", "content")
    return Turn(role, content_of(fields, "content", _part), fields.where)


def _answer(fields: Fields) -> Turn:
    """Returns an earlier answer of the assistant."""
    fields.only("role", "content", "tool_calls", "reasoning_content", "reasoning")
    given: Sequence[Any] = fields.array("tool_calls") or ()
    calls = [Fields.of(call, f"{fields.place('tool_calls')}[{index}]") for index, call in enumerate(given)]
    has_no_text = bool(calls) and fields.raw("content") is None
    return Turn(
        "assistant",
        Content() if has_no_text else content_of(fields, "content", _part),
        fields.where,
        calls=[_call(call) for call in calls],
        call_places=[call.where for call in calls],
        reasoning=_reasoning(fields),
    )


def _result(fields: Fields) -> Turn:
    """Returns the result of a function."""
    fields.only("role", "content", "tool_call_id")
    return Turn(
        "tool",
        content_of(fields, "content", _text_part),
        fields.where,
        call_id=fields.needed("tool_call_id", fields.text("tool_call_id")),
    )


def _call(call: Fields) -> ToolCall:
    # Clients that have put a call together from a stream leave its index there.
    call.only("id", "type", "function", "index")
    if call.text("type") not in (None, "function"):
        raise call.wrong("type", "must be function")
    # OpenAI's client adds the arguments that it has parsed.
    function = call.inner("function").only("name", "arguments", "parsed_arguments")
    return ToolCall(
        call.needed("id", call.text("id")),
        function.needed("name", function.text("name")),
        function.needed("arguments", function.text("arguments")),
    )


def _reasoning(fields: Fields) -> str:
    first, second = fields.text("reasoning_content") or "", fields.text("reasoning") or ""
    if first and second and first != second:
        raise fields.wrong("reasoning", "differs from reasoning_content")
    return first or second


def _text_part(part: Fields) -> Part:
    if part.text("type") != "text":
        raise part.wrong("type", "must be text")
    return part.only("type", "text").needed("text", part.text("text"))


def _part(part: Fields) -> Part:
    kind = part.text("type")
    if kind == "text":
        return _text_part(part)
    if kind != "image_url":
        raise part.wrong("type", "must be text or image_url")
    image = part.only("type", "image_url").inner("image_url").only("url", "detail", "max_pixels")
    url = image.needed("url", image.text("url"))
    return image_part(image, url, image.text("detail"), image.integer("max_pixels"))
