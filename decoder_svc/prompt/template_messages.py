"""Conversations and functions in the form in which chat templates take them: that of transformers."""

from __future__ import annotations

import functools
import hashlib
import json
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from decoder_svc.prompt.prompt_spec import ChatMessage, ChatRole, ImagePart, TextPart, VideoPart
from decoder_svc.prompt.text_marks import TextMarks
from decoder_svc.tools.tool import Tool
from lookonce.errors import InvalidParameterError

UNMARKED_NAMES = frozenset(
    {
        *("type", "function", "name", "description", "parameters", "strict", "arguments", "nullable", "properties"),
        *("required", "items", "prefixItems", "enum", "const", "default", "title", "format", "pattern", "examples"),
        *("additionalProperties", "anyOf", "oneOf", "allOf", "not", "$defs", "definitions", "$ref", "$schema", "$id"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
        *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "patternProperties"),
    }
)
"""Words of JSON schemas and of transformers' form of functions. Templates look for them, so they get no marks. None of
them spells a control token."""
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
# Ids that every template takes: those of Mistral have this form.
_ID_LENGTH = 9
_ID_CHARS = string.ascii_letters + string.digits


class TemplateForm:
    """Converts the messages of one conversation for a template."""

    def __init__(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], *, has_text_results: bool) -> None:
        """`has_text_results`: the template takes results of functions as texts.

        Raises InvalidParameterError for parameters that are no JSON object. Arguments that are none were written by a
        model; the template gets their text.
        """
        self._messages = messages
        self._tools = [(tool, _object(f"chat.tools[{i}].parameters", tool.parameters)) for i, tool in enumerate(tools)]
        self._arguments = {
            (i, k): _object_or_text(call.arguments)
            for i, message in enumerate(messages)
            for k, call in enumerate(message.calls)
        }
        self._name_of = {call.id: call.name for message in messages for call in message.calls}
        self._has_text_results = has_text_results

    def values(self) -> Iterator[str]:
        """Yields all texts that are part of data."""
        for tool, parameters in self._tools:
            yield from (tool.name, tool.description)
            yield from _texts(parameters)
        yield from self._name_of.values()
        for arguments in self._arguments.values():
            yield from _texts(arguments)

    def functions(self, marks: TextMarks) -> list[dict[str, Any]] | None:
        """Returns the functions with marked texts; None without any."""
        functions = [
            {
                "type": "function",
                "function": {
                    "name": marks.bordered(tool.name),
                    "description": marks.bordered(tool.description),
                    "parameters": _marked(parameters, marks) or {"type": "object", "properties": {}},
                },
            }
            for tool, parameters in self._tools
        ]
        return functions or None

    def conversation(self, marks: TextMarks, mark: Callable[[str], str], *, in_text: bool) -> list[dict[str, Any]]:
        """Returns the messages. `mark` marks their texts, and `marks` those of data.

        With `in_text`, a message is one text, unless it is a user's or has images.
        """
        return [self._message(index, message, marks, mark, in_text) for index, message in enumerate(self._messages)]

    def _message(
        self, index: int, message: ChatMessage, marks: TextMarks, mark: Callable[[str], str], in_text: bool
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"role": message.role.value, "content": self._content(message, mark, in_text)}
        if message.reasoning:
            found["reasoning_content"] = mark(message.reasoning)
        if message.calls:
            found["tool_calls"] = [
                {
                    "id": _id_of(call.id),
                    "type": "function",
                    "function": {
                        "name": marks.bordered(call.name),
                        "arguments": _marked(self._arguments[index, number], marks),
                    },
                }
                for number, call in enumerate(message.calls)
            ]
        if message.role is ChatRole.TOOL:
            found |= {
                "tool_call_id": _id_of(message.call_id),
                "name": marks.bordered(self._name_of[message.call_id]),
            }
        return found

    def _content(self, message: ChatMessage, mark: Callable[[str], str], in_text: bool) -> str | list[dict[str, str]]:
        has_images = not all(isinstance(part, TextPart) for part in message.parts)
        is_text = not has_images and (
            not message.parts
            or (message.role is ChatRole.TOOL and self._has_text_results)
            or (message.role is not ChatRole.USER and in_text)
        )
        if is_text:
            return "".join(mark(part.text) for part in message.parts if isinstance(part, TextPart))
        return [_part(part, mark) for part in message.parts]


def _part(part: TextPart | ImagePart | VideoPart, mark: Callable[[str], str]) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": mark(part.text)}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}


def _object(field: str, text: str) -> dict[str, Any]:
    """Returns a JSON object; an empty text is one without content. Raises InvalidParameterError."""
    try:
        objects = functools.partial(_with_names_once, field)
        value = json.loads(text, parse_constant=no_constant, object_pairs_hook=objects) if text else {}
    except (ValueError, RecursionError):
        raise InvalidParameterError(field, "is no JSON") from None
    if not isinstance(value, dict):
        raise InvalidParameterError(field, "must be a JSON object")
    return value


def _with_names_once(field: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object. Of two values with one name, such as two types of an argument, only the last would count."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidParameterError(field, f"an object has the name {name[:64]!r} twice")
        found[name] = value
    return found


def _object_or_text(text: str) -> dict[str, Any] | str:
    try:
        return _object("", text)
    except InvalidParameterError:
        return text


def no_constant(name: str) -> None:
    """Refuses NaN and Infinity, which are no JSON. Raises ValueError."""
    raise ValueError(name)


def _id_of(call_id: str) -> str:
    """Returns the id that templates get: the same one if it has their form, else one that is made from it."""
    if len(call_id) == _ID_LENGTH and all(char in _ID_CHARS for char in call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode()).digest()
    return "".join(_ID_CHARS[byte % len(_ID_CHARS)] for byte in digest[:_ID_LENGTH])


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts and names in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _marked(value: Any, marks: TextMarks, key: str = "") -> Any:
    """Returns a JSON value with marked texts. `key` is the name under which it stands."""
    if isinstance(value, str):
        return value if key == "type" and value in _TYPES else marks.bordered(value)
    if isinstance(value, dict):
        return {
            name if name in UNMARKED_NAMES else marks.bordered(name): _marked(each, marks, name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_marked(each, marks, key) for each in value]
    return value
