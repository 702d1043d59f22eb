"""The functions that a model may call, and the choice among them, as the SDK's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway_svc.apis.parsing.fields import HONOURED, Field, Fields
from lookonce.generation import GenerateOptions, Tool
from lookonce.sdk.tools import json_text

TOOLS_NOTE = (
    "Functions, at most 128; tools that the server would run are refused. The model's chat template must know "
    "functions. Arguments conform to their schema where a call is forced or the function is `strict`. A `strict` "
    "function without a forced call needs a model that marks its calls by a token."
)
PARALLEL_NOTE = "With `false`, the answer ends behind its first call."

# Decoders take as many.
_MAX_TOOLS = 128
_MODES = ("auto", "none", "required")
# Anthropic's names of the modes.
_ANTHROPIC_MODES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_ANTHROPIC_TOOL: Mapping[str, Field] = {
    "type": Field("refused", "Only functions of the type custom are.", ("custom",)),
    "name": HONOURED,
    "description": HONOURED,
    "input_schema": HONOURED,
    "strict": HONOURED,
    "cache_control": Field("label"),
    "eager_input_streaming": Field("refused", "Arguments are streamed as they are generated.", (True,)),
    "allowed_callers": Field("refused", neutral=(["direct"],)),
    "defer_loading": Field("refused", neutral=(False,)),
    "input_examples": Field("refused", neutral=([],)),
}


def chat_tools(fields: Fields) -> GenerateOptions:
    """Returns the options of a chat completion. Raises InvalidParameterError for other tools than functions."""

    def tool_of(given: Fields) -> Tool:
        return _tool(_function(given).only("name", "description", "parameters", "strict"), "parameters")

    def name_of(choice: Fields) -> str:
        return _name_to_force(_function(choice).only("name"))

    choice = _openai_choice(fields, name_of)
    return _options(_tools(fields, tool_of), choice, fields.flag("parallel_tool_calls"))


def response_tools(fields: Fields) -> GenerateOptions:
    """Returns the options of a response. Raises InvalidParameterError for other tools than functions."""

    def tool_of(given: Fields) -> Tool:
        _check_type(given)
        return _tool(given.only("type", "name", "description", "parameters", "strict"), "parameters")

    def name_of(choice: Fields) -> str:
        _check_type(choice)
        return _name_to_force(choice.only("type", "name"))

    choice = _openai_choice(fields, name_of)
    return _options(_tools(fields, tool_of), choice, fields.flag("parallel_tool_calls"))


def message_tools(fields: Fields) -> GenerateOptions:
    """Returns the options of a message of Anthropic's. Raises InvalidParameterError for other tools than functions."""

    def tool_of(given: Fields) -> Tool:
        if (kind := given.text("type")) not in (None, "custom"):
            raise given.wrong("type", f"{kind[:100]} is not offered; only functions, of the type custom, are")
        return _tool(given.check(_ANTHROPIC_TOOL), "input_schema")

    tools = _tools(fields, tool_of)
    if fields.raw("tool_choice") is None:
        return _options(tools, None, None)
    choice = fields.inner("tool_choice").only("type", "name", "disable_parallel_tool_use")
    return _options(tools, _anthropic_choice(choice), not choice.flag("disable_parallel_tool_use"))


def _options(tools: Sequence[Tool], choice: str | None, is_parallel: bool | None) -> GenerateOptions:
    options: GenerateOptions = {}
    if tools:
        options["tools"] = tools
    # Without functions these two ask for nothing.
    if choice is not None and (tools or choice not in ("auto", "none")):
        options["tool_choice"] = choice
    if tools and is_parallel is False:
        options["parallel_tool_calls"] = False
    return options


def _tools(fields: Fields, tool_of: Callable[[Fields], Tool]) -> list[Tool]:
    given: list[Any] = fields.array("tools") or []
    if len(given) > _MAX_TOOLS:
        raise fields.wrong("tools", f"must be at most {_MAX_TOOLS}, got {len(given)}")
    return [tool_of(Fields.of(tool, f"tools[{index}]")) for index, tool in enumerate(given)]


def _tool(fields: Fields, schema_name: str) -> Tool:
    schema = fields.raw(schema_name)
    if schema is not None and not isinstance(schema, dict):
        raise fields.wrong(schema_name, "must be a JSON schema of an object")
    return Tool(
        name=fields.needed("name", fields.text("name")),
        description=fields.text("description") or "",
        # It is text here, so that it is converted once for all answers.
        parameters=None if schema is None else json_text(fields.place(schema_name), schema),
        strict=fields.flag("strict") or False,
    )


def _openai_choice(fields: Fields, name_of: Callable[[Fields], str]) -> str | None:
    value = fields.raw("tool_choice")
    if value is None:
        return None
    if isinstance(value, str) and value in _MODES:
        return value
    if not isinstance(value, dict):
        raise fields.wrong("tool_choice", "must be auto, none, required or a function")
    return name_of(fields.inner("tool_choice"))


def _anthropic_choice(choice: Fields) -> str:
    kind = choice.needed("type", choice.text("type"))
    if kind == "tool":
        return _name_to_force(choice)
    if kind not in _ANTHROPIC_MODES:
        raise choice.wrong("type", "must be auto, any, tool or none")
    if choice.raw("name") is not None:
        raise choice.wrong("name", "is for the type tool")
    return _ANTHROPIC_MODES[kind]


def _function(fields: Fields) -> Fields:
    """Returns the fields of the function of a tool, or of a choice, of chats."""
    _check_type(fields)
    return fields.only("type", "function").inner("function")


def _check_type(fields: Fields) -> None:
    kind = fields.needed("type", fields.text("type"))
    if kind != "function":
        raise fields.wrong("type", f"{kind[:100]} is not offered; only function is")


def _name_to_force(fields: Fields) -> str:
    name = fields.needed("name", fields.text("name"))
    if name in _MODES:
        # The SDK would take it for the mode.
        raise fields.wrong("name", f"a function with the name {name} cannot be chosen; rename it")
    return name
