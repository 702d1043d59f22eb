"""Every field of OpenAI's and Anthropic's requests is honoured, a label, or refused by name. None is ignored."""

from __future__ import annotations

import ast
import inspect
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from gateway_svc.apis import (
    chat,
    chat_messages,
    completions,
    embeddings,
    message_blocks,
    messages,
    response_items,
    responses,
    usage,
)
from gateway_svc.apis.chat import CHAT_FIELDS, ChatRequest
from gateway_svc.apis.completions import COMPLETION_FIELDS, CompletionRequest
from gateway_svc.apis.embeddings import EMBEDDING_FIELDS, EmbeddingRequest
from gateway_svc.apis.messages import MESSAGE_FIELDS, MessagesRequest
from gateway_svc.apis.parsing import model_options, sampling, tools
from gateway_svc.apis.parsing.fields import EXTENSIONS, Field
from gateway_svc.apis.responses import RESPONSE_FIELDS, ResponseRequest
from lookonce.errors import InvalidParameterError
from lookonce.generation import GenerateOptions

TABLES: dict[str, tuple[Mapping[str, Field], Any, Any, dict[str, Any]]] = {
    "chat": (
        CHAT_FIELDS,
        ChatRequest.parse,
        chat_create_params.CompletionCreateParamsBase,
        {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    ),
    "completions": (
        COMPLETION_FIELDS,
        CompletionRequest.parse,
        completion_create_params.CompletionCreateParamsBase,
        {"model": "m", "prompt": "hello"},
    ),
    "embeddings": (
        EMBEDDING_FIELDS,
        EmbeddingRequest.parse,
        embedding_create_params.EmbeddingCreateParams,
        {"model": "m", "input": "hello"},
    ),
    "messages": (
        MESSAGE_FIELDS,
        MessagesRequest.parse,
        message_create_params.MessageCreateParamsBase,
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
    ),
    "responses": (
        RESPONSE_FIELDS,
        ResponseRequest.parse,
        response_create_params.ResponseCreateParamsBase,
        {"model": "m", "input": "hello"},
    ),
}
MODULES = {
    "chat": (chat, chat_messages, model_options, tools),
    "completions": (completions, chat),
    "embeddings": (embeddings, chat_messages),
    "messages": (messages, message_blocks, tools),
    "responses": (responses, response_items, chat, model_options, tools),
}
REFUSED = [
    (name, field) for name, (table, *_) in TABLES.items() for field, one in table.items() if one.rule == "refused"
]


@pytest.mark.parametrize("name", TABLES)
def test_all_fields_of_the_official_client_are_in_the_table(name: str) -> None:
    table, _, official, _ = TABLES[name]
    assert set(official.__annotations__) - set(table) == set()
    # `stream` belongs to the two forms of the official type. Embeddings come as one object.
    assert ("stream" in table) == (name != "embeddings")


@pytest.mark.parametrize("name", TABLES)
def test_every_honoured_field_is_read(name: str) -> None:
    table = TABLES[name][0]
    source = "".join(pathlib.Path(inspect.getfile(module)).read_text() for module in (*MODULES[name], sampling, usage))
    read = {
        node.args[0].value
        for node in ast.walk(ast.parse(source.replace("from __future__ import annotations", "")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("number", "integer", "flag", "text", "texts", "integers", "array", "raw", "needed")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    read |= {"response_format", "text"}
    assert {field for field, one in table.items() if one.rule == "honoured"} - read == set()


@pytest.mark.parametrize(("name", "field"), REFUSED)
def test_a_refused_field_is_named(name: str, field: str) -> None:
    table, parse, _, least = TABLES[name]
    with pytest.raises(InvalidParameterError) as caught:
        parse({**least, field: ["a value"]})
    assert caught.value.field == field
    for neutral in (None, *table[field].neutral):
        parse({**least, field: neutral})


def test_neutral_values_have_their_type() -> None:
    least = TABLES["completions"][3]
    with pytest.raises(InvalidParameterError, match="best_of"):
        CompletionRequest.parse({**least, "best_of": True})


@pytest.mark.parametrize("name", TABLES)
def test_an_unknown_field_is_refused(name: str) -> None:
    _, parse, _, least = TABLES[name]
    with pytest.raises(InvalidParameterError, match="frobnicate: is not known"):
        parse({**least, "frobnicate": None})


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", [1]),
        ("top_k", 1.5),
        ("top_k", True),
        ("model", 7),
        ("stream", 1),
        ("stream", "true"),
    ],
)
def test_values_of_a_wrong_type_are_named(name: str, field: str, value: Any) -> None:
    _, parse, _, least = TABLES[name]
    with pytest.raises(InvalidParameterError) as caught:
        parse({**least, field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 17),
        ("n", "2"),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"99999999999": 1}),
        ("seed", 1.5),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("messages", "hello"),
        ("messages", None),
    ],
)
def test_wrong_values_of_a_chat_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ChatRequest.parse({**TABLES["chat"][3], field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hello", "messages[0]"),
        ({"content": "hello"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[0].content"),
        ({"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "tool", "tool_call_id": "1", "content": "x", "name": "find"}, "messages[0].name"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].type"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]},
            "messages[0].tool_calls[0].id",
        ),
        ({"role": "assistant", "content": "x", "function_call": {"name": "x"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "x", "reasoning_content": 3}, "messages[0].reasoning_content"),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "a", "reasoning": "b"},
            "messages[0].reasoning",
        ),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages[0].name"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[0].content[0].image_url"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].image_url.url"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x", "detail": "best"}}]},
            "messages[0].content[0].image_url.detail",
        ),
    ],
)
def test_wrong_messages_are_named(message: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ChatRequest.parse({"model": "m", "messages": [message]})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", "low"),
        ("stop_token_ids", [1, "2"]),
        ("stop_token_ids", 3),
        ("stop_token_ids", [True]),
        ("cache_salt", 1),
        ("ignore_eos", "no"),
    ],
)
@pytest.mark.parametrize("name", ["chat", "completions", "responses"])
def test_extensions_of_a_wrong_type_are_named(name: str, field: str, value: Any) -> None:
    _, parse, _, least = TABLES[name]
    with pytest.raises(InvalidParameterError) as caught:
        parse({**least, field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0].type"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "x"}]}]},
            "messages[0].content[0].input",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": "adaptive"}, "thinking"),
    ],
)
def test_wrong_values_of_a_message_are_named(values: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        MessagesRequest.parse({**TABLES["messages"][3], **values})
    assert caught.value.field == field


def test_two_names_of_one_limit_must_agree() -> None:
    least = TABLES["chat"][3]
    assert ChatRequest.parse({**least, "max_tokens": 3, "max_completion_tokens": 3}).options == {"max_tokens": 3}
    with pytest.raises(InvalidParameterError, match="differs"):
        ChatRequest.parse({**least, "max_tokens": 3, "max_completion_tokens": 4})


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "name": "x"},
        {"type": "function_call_output", "output": "x"},
        {"type": "function_call_output", "call_id": "x"},
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_file"}]},
        {"type": "web_search_call", "id": "x"},
        {"type": "item_reference", "id": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "content": [{"type": "text", "text": "x"}]},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
        {"role": "user", "content": [{"type": "input_image", "file_id": "x"}]},
    ],
)
def test_items_of_responses_that_are_not_served_are_refused(item: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"input\[0\]"):
        ResponseRequest.parse({"model": "m", "input": [item]})


def test_extensions_are_options_of_the_sdk() -> None:
    assert set(EXTENSIONS) <= set(GenerateOptions.__annotations__)
