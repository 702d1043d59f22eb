"""Converts functions, calls and template arguments between plain data and protobuf. Calls no server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import InvalidParameterError
from lookonce.generation import Delta, Tool, ToolCall, ToolCallDelta

CHAT_OPTIONS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "template_arguments"})
"""Options that belong to a chat."""
_MODES = {
    "auto": decoder_pb2.TOOL_MODE_AUTO,
    "none": decoder_pb2.TOOL_MODE_NONE,
    "required": decoder_pb2.TOOL_MODE_REQUIRED,
}


def add_chat_options(chat: decoder_pb2.ChatPrompt, options: Mapping[str, object]) -> None:
    """Adds functions, the choice among them and template arguments. Raises InvalidParameterError."""
    tools = options.get("tools", ())
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise InvalidParameterError("tools", f"must be a list of Tool, not {type(tools).__name__}")
    chat.tools.extend(_tool(tool) for tool in tools)
    if (choice := options.get("tool_choice")) is not None:
        if not isinstance(choice, str):
            raise InvalidParameterError("tool_choice", f"must be a str, not {type(choice).__name__}")
        mode = _MODES.get(choice)
        chat.tool_choice.mode = decoder_pb2.TOOL_MODE_NAMED if mode is None else mode
        chat.tool_choice.name = choice if mode is None else ""
    if options.get("parallel_tool_calls") is False:
        chat.tool_choice.single_call = True
    if (arguments := options.get("template_arguments")) is not None:
        chat.template_arguments = json_text("template_arguments", arguments)


def _tool(tool: object) -> decoder_pb2.Tool:
    if not isinstance(tool, Tool):
        raise InvalidParameterError("tools", f"must be a list of Tool, not of {type(tool).__name__}")
    parameters = tool.parameters
    text = "" if parameters is None else parameters if isinstance(parameters, str) else json_text("tools", parameters)
    try:
        return decoder_pb2.Tool(name=tool.name, description=tool.description, parameters=text, strict=bool(tool.strict))
    except (TypeError, ValueError):
        raise InvalidParameterError("tools", f"{tool.name!r} has a value of a wrong type") from None


def add_calls(message: decoder_pb2.ChatMessage, calls: Sequence[ToolCall]) -> None:
    """Adds the calls of an earlier answer. Raises InvalidParameterError."""
    for call in calls:
        given: object = call
        if not isinstance(given, ToolCall):
            raise InvalidParameterError("tool_calls", f"must be a list of ToolCall, not of {type(given).__name__}")
        try:
            message.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
        except (TypeError, ValueError):
            raise InvalidParameterError("tool_calls", "has a value of a wrong type") from None


def delta_of(delta: decoder_pb2.StreamDelta) -> Delta:
    """Returns what a message adds to an answer."""
    calls = tuple(ToolCallDelta(call.index, call.arguments, call.id, call.name) for call in delta.tool_calls)
    return Delta(delta.text, delta.reasoning, calls)


def calls_of(choice: decoder_pb2.Choice) -> tuple[ToolCall, ...]:
    """Returns the calls of an answer."""
    return tuple(ToolCall(call.id, call.name, call.arguments) for call in choice.tool_calls)


class GrowingCalls:
    """The calls of one answer, from their parts."""

    def __init__(self) -> None:
        self._heads: list[tuple[str, str]] = []
        self._arguments: list[list[str]] = []

    def add(self, parts: Iterable[ToolCallDelta]) -> bool:
        """Adds parts in order. Returns False if one belongs to no call."""
        for part in parts:
            if part.id:
                self._heads.append((part.id, part.name))
                self._arguments.append([])
            if part.index != len(self._heads) - 1:
                return False
            self._arguments[-1].append(part.arguments)
        return True

    def whole(self) -> tuple[ToolCall, ...]:
        """Returns all calls so far."""
        return tuple(
            ToolCall(call_id, name, "".join(pieces))
            for (call_id, name), pieces in zip(self._heads, self._arguments, strict=True)
        )


def json_text(name: str, value: Any) -> str:
    """Returns a value as JSON. Raises InvalidParameterError for what is none."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidParameterError(name, "is no JSON") from None
