"""Reasoning, template arguments and functions are for models that have them, and are refused for others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from gateway_svc.apis.chat import ChatRequest
from gateway_svc.apis.messages import MessagesRequest
from gateway_svc.apis.responses import ResponseRequest
from lookonce.decoder_info import ModelInfo
from lookonce.errors import InvalidParameterError, UnsupportedError

# Only the last two fields count here.
INFO = ModelInfo(**{one.name: 0 for one in fields(ModelInfo)} | {"tool_format": "any", "template_arguments": ()})  # type: ignore[arg-type]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
RESPONSE: dict[str, Any] = {"model": "m", "input": "hello"}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "find"}}


def arguments_of(request: Any, *takes: str) -> dict[str, object] | None:
    """Returns the arguments of a template that takes some."""
    info = replace(INFO, template_arguments=takes)
    found: dict[str, object] | None = request.model_options.added_to(request.options, request.turns, info).get(
        "template_arguments"
    )
    return found


@pytest.mark.parametrize(
    ("request_", "takes", "expected"),
    [
        (ChatRequest.parse(CHAT), ["enable_thinking"], None),
        (ChatRequest.parse({**CHAT, "reasoning_effort": "none"}), ["enable_thinking"], {"enable_thinking": False}),
        (ChatRequest.parse({**CHAT, "reasoning_effort": "none"}), ["reasoning_effort"], None),
        (ChatRequest.parse({**CHAT, "reasoning_effort": "high"}), ["reasoning_effort"], {"reasoning_effort": "high"}),
        (ResponseRequest.parse({**RESPONSE, "reasoning": {}}), ["enable_thinking"], None),
        (
            ResponseRequest.parse({**RESPONSE, "reasoning": {"effort": "none"}}),
            ["enable_thinking"],
            {"enable_thinking": False},
        ),
        (ChatRequest.parse({**CHAT, "chat_template_kwargs": {"a": 1}}), ["a", "b"], {"a": 1}),
        (
            ChatRequest.parse({**CHAT, "chat_template_kwargs": {"a": None}, "reasoning_effort": "none"}),
            ["a", "enable_thinking"],
            {"a": None, "enable_thinking": False},
        ),
        (ResponseRequest.parse({**RESPONSE, "chat_template_kwargs": {"a": "x"}}), ["a"], {"a": "x"}),
        (
            MessagesRequest.parse({**CHAT, "max_tokens": 5, "thinking": {"type": "disabled"}}),
            ["enable_thinking"],
            {"enable_thinking": False},
        ),
        (
            MessagesRequest.parse({**CHAT, "max_tokens": 5, "thinking": {"type": "adaptive"}}),
            ["enable_thinking"],
            {"enable_thinking": True},
        ),
        (MessagesRequest.parse({**CHAT, "max_tokens": 5, "thinking": {"type": "adaptive"}}), [], None),
    ],
)
def test_arguments_of_the_template(request_: Any, takes: list[str], expected: Any) -> None:
    assert arguments_of(request_, *takes) == expected


@pytest.mark.parametrize(
    ("request_", "takes", "field"),
    [
        (ChatRequest.parse({**CHAT, "reasoning_effort": "low"}), ["enable_thinking"], "reasoning_effort"),
        (ResponseRequest.parse({**RESPONSE, "reasoning": {"effort": "low"}}), [], "reasoning.effort"),
        (ChatRequest.parse({**CHAT, "chat_template_kwargs": {"a": 1}}), ["b"], "chat_template_kwargs"),
        (
            ChatRequest.parse({**CHAT, "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}),
            ["enable_thinking"],
            "reasoning_effort",
        ),
    ],
)
def test_what_the_template_does_not_take_is_refused(request_: Any, takes: list[str], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        arguments_of(request_, *takes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": {}}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 65}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x" * 65: 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(index): 1 for index in range(33)}}, "chat_template_kwargs"),
    ],
)
def test_wrong_values_are_named(values: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ChatRequest.parse({**CHAT, **values})
    assert caught.value.field == field


@pytest.mark.parametrize("reasoning", [{"summary": "auto"}, {"effort": "much"}, {"generate_summary": "auto"}])
def test_other_wishes_about_reasoning_are_refused(reasoning: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"reasoning\."):
        ResponseRequest.parse({**RESPONSE, "reasoning": reasoning})


@pytest.mark.parametrize(
    "values",
    [
        {"tools": [FUNCTION]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "find", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "three"},
            ]
        },
    ],
)
def test_functions_are_refused_for_a_template_without_them(values: Any) -> None:
    """A decoder that is older than functions would not see them."""
    request = ChatRequest.parse({**CHAT, **values})
    request.model_options.added_to(request.options, request.turns, INFO)
    with pytest.raises(UnsupportedError) as caught:
        request.model_options.added_to(request.options, request.turns, replace(INFO, tool_format=""))
    assert caught.value.metadata["field"] == "tools"
