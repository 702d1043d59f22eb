"""Functions, calls and results of each interface become those of the SDK, and wrong ones are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gateway_svc.apis.chat import ChatRequest
from gateway_svc.apis.messages import MessagesRequest
from gateway_svc.apis.parsing.content import Turn
from gateway_svc.apis.responses import ResponseRequest
from lookonce.errors import InvalidParameterError
from lookonce.generation import Tool, ToolCall

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"colour": {"type": "string"}}}
FIND = Tool("find", "Finds it.", json.dumps(SCHEMA), strict=True)
STOP = Tool("stop")
CALL = ToolCall("call_1", "find", '{"colour": "red"}')
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
MESSAGE: dict[str, Any] = {**CHAT, "max_tokens": 5}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hello"}
Parse = Callable[[Mapping[str, Any]], Any]
APIS: dict[str, tuple[Parse, dict[str, Any], list[Any]]] = {
    "chat": (
        ChatRequest.parse,
        CHAT,
        [
            {
                "type": "function",
                "function": {"name": "find", "description": "Finds it.", "parameters": SCHEMA, "strict": True},
            },
            {"type": "function", "function": {"name": "stop", "strict": None}},
        ],
    ),
    "responses": (
        ResponseRequest.parse,
        RESPONSE,
        [
            {"type": "function", "name": "find", "description": "Finds it.", "parameters": SCHEMA, "strict": True},
            {"type": "function", "name": "stop", "parameters": None, "strict": None},
        ],
    ),
    "messages": (
        MessagesRequest.parse,
        MESSAGE,
        [
            {"name": "find", "description": "Finds it.", "input_schema": SCHEMA, "strict": True, "type": "custom"},
            {"name": "stop", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True},
        ],
    ),
}


def options_of(api: str, **values: Any) -> dict[str, Any]:
    """Returns the options of a request with the two functions."""
    parse, least, tools = APIS[api]
    options: dict[str, Any] = dict(parse({**least, "tools": tools, **values}).options)
    options.pop("max_tokens", None)
    return options


@pytest.mark.parametrize("api", APIS)
def test_functions(api: str) -> None:
    assert options_of(api) == {"tools": [FIND, STOP]}


@pytest.mark.parametrize(
    ("api", "choice", "expected"),
    [
        *((api, mode, mode) for api in ("chat", "responses") for mode in ("auto", "none", "required")),
        ("chat", {"type": "function", "function": {"name": "stop"}}, "stop"),
        ("responses", {"type": "function", "name": "stop"}, "stop"),
        ("messages", {"type": "auto"}, "auto"),
        ("messages", {"type": "any"}, "required"),
        ("messages", {"type": "none"}, "none"),
        ("messages", {"type": "tool", "name": "stop"}, "stop"),
    ],
)
def test_a_choice(api: str, choice: Any, expected: str) -> None:
    assert options_of(api, tool_choice=choice) == {"tools": [FIND, STOP], "tool_choice": expected}


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_one_call_at_most(api: str) -> None:
    assert options_of(api, parallel_tool_calls=False)["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in options_of(api, parallel_tool_calls=True)


def test_one_call_at_most_of_a_message() -> None:
    options = options_of("messages", tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert options == {"tools": [FIND, STOP], "tool_choice": "required", "parallel_tool_calls": False}
    options = options_of("messages", tool_choice={"type": "any", "disable_parallel_tool_use": False})
    assert "parallel_tool_calls" not in options


@pytest.mark.parametrize("api", APIS)
def test_without_functions_nothing_is_chosen(api: str) -> None:
    """Some clients send a choice with every request."""
    auto = {"type": "auto", "disable_parallel_tool_use": True} if api == "messages" else "auto"
    assert options_of(api, tools=[], tool_choice=auto) == {}
    if api != "messages":
        assert options_of(api, tools=[], parallel_tool_calls=False) == {}
        assert options_of(api, tools=[], tool_choice="required") == {"tool_choice": "required"}


def chat_tool(**changes: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "x", **changes}}]


@pytest.mark.parametrize(
    ("api", "values", "field"),
    [
        ("chat", {"tools": "x"}, "tools"),
        ("chat", {"tools": ["x"]}, "tools[0]"),
        ("chat", {"tools": [{}]}, "tools[0].type"),
        ("chat", {"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ("chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ("chat", {"tools": chat_tool(name=3)}, "tools[0].function.name"),
        ("chat", {"tools": chat_tool(description=3)}, "tools[0].function.description"),
        ("chat", {"tools": chat_tool(parameters="{}")}, "tools[0].function.parameters"),
        ("chat", {"tools": chat_tool(parameters={"minimum": float("inf")})}, "tools[0].function.parameters"),
        ("chat", {"tools": chat_tool(strict="yes")}, "tools[0].function.strict"),
        ("chat", {"tools": chat_tool(secret=1)}, "tools[0].function.secret"),
        ("chat", {"tools": chat_tool() * 129}, "tools"),
        ("chat", {"tool_choice": "any"}, "tool_choice"),
        ("chat", {"tool_choice": 3}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ("chat", {"tool_choice": {"type": "function", "name": "find"}}, "tool_choice.name"),
        ("chat", {"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ("chat", {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice.function.name"),
        ("chat", {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ("chat", {"functions": [{"name": "x"}]}, "functions"),
        ("chat", {"function_call": {"name": "x"}}, "function_call"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", {"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].function"),
        ("responses", {"tools": [{"type": "function", "name": "x", "parameters": []}]}, "tools[0].parameters"),
        ("responses", {"tools": [{"type": "function", "name": "x", "defer_loading": True}]}, "tools[0].defer_loading"),
        ("responses", {"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ("responses", {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ("responses", {"max_tool_calls": 3}, "max_tool_calls"),
        (
            "messages",
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]},
            "tools[0].type",
        ),
        ("messages", {"tools": [{"name": "x", "input_schema": "{}"}]}, "tools[0].input_schema"),
        ("messages", {"tools": [{"name": "x", "parameters": {}}]}, "tools[0].parameters"),
        ("messages", {"tools": [{"name": "x", "eager_input_streaming": False}]}, "tools[0].eager_input_streaming"),
        ("messages", {"tools": [{"name": "x", "input_examples": [{}]}]}, "tools[0].input_examples"),
        ("messages", {"tool_choice": "auto"}, "tool_choice"),
        ("messages", {"tool_choice": {}}, "tool_choice.type"),
        ("messages", {"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ("messages", {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ("messages", {"tool_choice": {"type": "tool", "name": "auto"}}, "tool_choice.name"),
        ("messages", {"tool_choice": {"type": "auto", "name": "find"}}, "tool_choice.name"),
        (
            "messages",
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
    ],
)
def test_what_is_wrong_is_named(api: str, values: Any, field: str) -> None:
    parse, least, _ = APIS[api]
    with pytest.raises(InvalidParameterError) as caught:
        parse({**least, **values})
    assert caught.value.field == field


def test_the_older_form_of_functions_names_the_newer_one() -> None:
    with pytest.raises(InvalidParameterError, match=r"functions: is not supported.*send `tools`"):
        ChatRequest.parse({**CHAT, "functions": [{"name": "x"}]})


def test_a_tool_that_the_server_would_run_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidParameterError, match="web_search_preview is not offered"):
        ResponseRequest.parse({**RESPONSE, "tools": [{"type": "web_search_preview"}]})


def plain(turn: Turn) -> tuple[Any, ...]:
    return turn.role, list(turn.content.parts), list(turn.calls), turn.reasoning, turn.call_id


CONVERSATION = [
    ("user", ["Find it."], [], "", ""),
    ("assistant", ["Well."], [CALL, ToolCall("call_2", "stop", "{}")], "Hm.", ""),
    ("tool", ["three"], [], "", "call_1"),
    ("tool", ["no"], [], "", "call_2"),
    ("assistant", ["Three."], [], "", ""),
    ("user", ["Thanks."], [], "", ""),
]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "user", "content": "Find it."},
            {
                "role": "assistant",
                "content": "Well.",
                "refusal": None,
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": CALL.arguments}},
                    {"id": "call_2", "index": 1, "function": {"name": "stop", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "three"},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "no"}]},
            {"role": "assistant", "content": "Three."},
            {"role": "user", "content": "Thanks."},
        ]
    },
    "responses": {
        "input": [
            {"role": "user", "content": "Find it."},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
            {"type": "function_call", "id": "a", "call_id": "call_1", "name": "find", "arguments": CALL.arguments},
            {"type": "function_call", "call_id": "call_2", "name": "stop", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": "three"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "no"}]},
            {"role": "assistant", "content": "Three."},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "An answer was cut off."}]},
            {"role": "user", "content": "Thanks."},
        ]
    },
    "messages": {
        "messages": [
            {"role": "user", "content": "Find it."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Well."},
                    {"type": "tool_use", "id": "call_1", "name": "find", "input": {"colour": "red"}},
                    {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "three"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_2",
                        "content": [{"type": "text", "text": "no"}],
                        "is_error": True,
                    },
                ],
            },
            {"role": "assistant", "content": "Three."},
            {"role": "user", "content": "Thanks."},
        ]
    },
}


@pytest.mark.parametrize("api", APIS)
def test_a_conversation(api: str) -> None:
    parse, least, _ = APIS[api]
    assert [plain(turn) for turn in parse({**least, **CONVERSATIONS[api]}).turns] == CONVERSATION


PLACES = {
    "chat": ("messages[1].tool_calls[1].function.arguments", "messages[3].tool_call_id", "messages[5]"),
    "responses": ("input[4].arguments", "input[6].call_id", "input[9]"),
    "messages": ("messages[1].content[3].input", "messages[2].content[1].tool_use_id", "messages[4]"),
}


@pytest.mark.parametrize("api", APIS)
def test_errors_have_the_places_of_calls_and_results(api: str) -> None:
    parse, least, _ = APIS[api]
    request = parse({**least, **CONVERSATIONS[api]})
    fields = ("chat.messages[1].tool_calls[1].arguments", "chat.messages[3].tool_call_id", "chat.messages[5]")
    found = [request.renamed(InvalidParameterError(field, "is wrong")).metadata["field"] for field in fields]
    assert found == list(PLACES[api])


@pytest.mark.parametrize(
    ("api", "expected"),
    [
        ("chat", ["tools[1].function.parameters", "tools[1].function.name", "tool_choice.function.name", "tools"]),
        ("responses", ["tools[1].parameters", "tools[1].name", "tool_choice.name", "tools"]),
        ("messages", ["tools[1].input_schema", "tools[1].name", "tool_choice.name", "tools"]),
    ],
)
def test_errors_have_the_places_of_functions(api: str, expected: list[str]) -> None:
    parse, least, _ = APIS[api]
    fields = ("chat.tools[1].parameters", "chat.tools[1].name", "chat.tool_choice.name", "chat.tools")
    errors = (InvalidParameterError(field, "is wrong") for field in fields)
    assert [parse(least).renamed(error).metadata["field"] for error in errors] == expected


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([("call", 1), ("text", "a")], [("a", 1, "")]),
        ([("text", "a"), ("text", "b")], [("a", 0, ""), ("b", 0, "")]),
        ([("reasoning", "x"), ("reasoning", "y"), ("call", 1)], [("", 1, "x\ny")]),
        ([("call", 1), ("reasoning", "x"), ("call", 1)], [("", 1, ""), ("", 1, "x")]),
        ([("text", "a"), ("call", 2)], [("a", 2, "")]),
    ],
)
def test_items_in_a_row_are_one_answer(items: list[tuple[str, Any]], expected: list[tuple[str, int, str]]) -> None:
    def of(kind: str, value: Any) -> list[dict[str, Any]]:
        if kind == "call":
            return [{"type": "function_call", "call_id": "c", "name": "stop", "arguments": "{}"}] * int(value)
        if kind == "reasoning":
            return [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": value}]}]
        return [{"role": "assistant", "content": value}]

    given = [one for kind, value in items for one in of(kind, value)]
    turns = ResponseRequest.parse({**RESPONSE, "input": given}).turns
    assert [("".join(map(str, turn.content.parts)), len(turn.calls), turn.reasoning) for turn in turns] == expected


def test_a_question_among_results_keeps_its_place() -> None:
    blocks = [
        {"type": "text", "text": "Before."},
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "text", "text": "After."},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
    ]
    request = MessagesRequest.parse({**MESSAGE, "messages": [{"role": "user", "content": blocks}]})
    assert [(turn.role, turn.content.parts[0]) for turn in request.turns] == [
        ("user", "Before."),
        ("tool", ""),
        ("user", "After."),
    ]
    error = request.renamed(InvalidParameterError("images[0].max_pixels", "is wrong"))
    assert error.metadata["field"] == "messages[0].content[3]"


def test_an_answer_that_was_cut_off_in_its_reasoning_is_a_message() -> None:
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}]
    request = MessagesRequest.parse({**MESSAGE, "messages": [{"role": "assistant", "content": blocks}]})
    assert [plain(turn) for turn in request.turns] == [("assistant", [""], [], "Hm.", "")]


@pytest.mark.parametrize("api", APIS)
def test_large_schemas_and_arguments_count_as_text(api: str) -> None:
    parse, least, tools = APIS[api]
    text = "x" * (8 << 20)
    changed = json.loads(json.dumps(tools).replace("Finds it.", text))
    with pytest.raises(InvalidParameterError, match="characters"):
        parse({**least, "tools": changed})
    conversation = json.loads(json.dumps(CONVERSATIONS[api]).replace("Hm.", text))
    with pytest.raises(InvalidParameterError, match="characters"):
        parse({**least, **conversation})
