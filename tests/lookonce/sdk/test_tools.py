"""Functions, calls and reasoning in both clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lookonce import AsyncClient, Client, Message, TextPrompt, Tool, ToolCall, ToolCallDelta
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import InternalError, InvalidParameterError
from lookonce.generation import Delta
from lookonce.sdk.answers import Transcript
from lookonce.sdk.messages import PreparedPrompt
from lookonce.testing import FakeServer

FIND = Tool("find", "Finds it.", {"type": "object", "properties": {"x": {"type": "integer"}}}, strict=True)
CALLS = (ToolCall("abc123def", "find", '{"x": 1}'), ToolCall("ghi456jkl", "find", '{"x": 22}'))
ANSWER = Message("assistant", "Let me see.", CALLS, "It asks for two.")


def test_an_answer_with_calls_and_the_next_turn() -> None:
    with FakeServer(ANSWER) as server, Client.connect(server.target) as client:
        chat = [Message("user", "Find them.")]
        answer = client.generate(
            chat, tools=[FIND], tool_choice="required", template_arguments={"enable_thinking": True}
        )
        assert (answer.text, answer.reasoning) == ("Let me see.", "It asks for two.")
        assert (answer.tool_calls, answer.finish_reason) == (CALLS, "tool_calls")
        results = [Message("tool", "7", tool_call_id=call.id) for call in answer.tool_calls]
        client.generate([*chat, answer.message, *results], tools=[FIND])
    first, second = server.requests
    (tool,) = first.tools
    assert (tool.name, tool.description, tool.strict) == ("find", "Finds it.", True)
    assert json.loads(str(tool.parameters)) == FIND.parameters
    assert (first.tool_choice, json.loads(first.template_arguments)) == ("required", {"enable_thinking": True})
    assert second.messages[1] == ANSWER
    assert [message.tool_call_id for message in second.messages[2:]] == [call.id for call in CALLS]
    assert second.tool_choice == "auto"


def check_deltas(deltas: list[Delta]) -> None:
    assert "".join(delta.text for delta in deltas) == ANSWER.content
    assert "".join(delta.reasoning for delta in deltas) == ANSWER.reasoning
    parts = [part for delta in deltas for part in delta.tool_calls]
    assert [(part.id, part.name) for part in parts if part.id] == [(call.id, call.name) for call in CALLS]
    for index, call in enumerate(CALLS):
        assert "".join(part.arguments for part in parts if part.index == index) == call.arguments


def test_a_stream_gives_text_or_all_parts() -> None:
    with FakeServer(ANSWER) as server, Client.connect(server.target) as client:
        with client.stream("Find them.", tools=[FIND]) as stream:
            assert list(stream) == ["Let", " me", " see."]
            assert (stream.generation.tool_calls, stream.generation.reasoning) == (CALLS, ANSWER.reasoning)
        with client.stream("Find them.", tools=[FIND]) as stream:
            check_deltas(list(stream.deltas()))
            assert stream.generation.finish_reason == "tool_calls"


async def test_a_stream_of_the_other_client() -> None:
    with FakeServer(ANSWER) as server:
        async with AsyncClient.connect(server.target) as client:
            async with client.stream("Find them.", tools=[FIND]) as stream:
                assert [piece async for piece in stream] == ["Let", " me", " see."]
                assert stream.generation.message == ANSWER
            async with client.stream("Find them.", tools=[FIND]) as stream:
                check_deltas([delta async for delta in stream.deltas()])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, pb.ToolChoice()),
        ({"tool_choice": "none"}, pb.ToolChoice(mode=pb.TOOL_MODE_NONE)),
        ({"tool_choice": "find"}, pb.ToolChoice(mode=pb.TOOL_MODE_NAMED, name="find")),
        ({"parallel_tool_calls": False}, pb.ToolChoice(single_call=True)),
        ({"parallel_tool_calls": True}, pb.ToolChoice()),
        ({"tool_choice": None, "parallel_tool_calls": None}, pb.ToolChoice()),
    ],
)
def test_choices(options: Any, expected: pb.ToolChoice) -> None:
    given: Any = {"tools": [FIND], **options}
    assert PreparedPrompt("x", (), given).params().chat.tool_choice == expected


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", {"tools": "find"}, "tools"),
        ("x", {"tools": [{"name": "find"}]}, "tools"),
        ("x", {"tools": [Tool("find", parameters={"x": object()})]}, "tools"),
        ("x", {"tools": [Tool(5)]}, "tools"),  # type: ignore[arg-type]
        ("x", {"tool_choice": {"name": "find"}}, "tool_choice"),
        ("x", {"template_arguments": {"x": float("nan")}}, "template_arguments"),
        (TextPrompt("x"), {"tools": [FIND]}, "tools"),
        ([Message("assistant", "x", tool_calls=["find"])], {}, "tool_calls"),  # type: ignore[list-item]
        ([Message("assistant", "x", tool_calls=[ToolCall("1", "find", {})])], {}, "tool_calls"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_named(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        PreparedPrompt(prompt, (), options).params()
    assert caught.value.field == field


def test_a_message_with_calls_needs_no_text() -> None:
    chat = [
        Message("user", "x"),
        Message("assistant", tool_calls=CALLS),
        Message("tool", "7", tool_call_id=CALLS[0].id),
    ]
    messages = PreparedPrompt(chat, (), {}).params().chat.messages
    assert [len(message.parts) for message in messages] == [1, 0, 1]


def test_a_gap_in_the_calls_of_a_stream_is_an_error() -> None:
    def event(*parts: pb.ToolCallDelta) -> pb.GenerateStreamResponse:
        return pb.GenerateStreamResponse(delta=pb.StreamDelta(tool_calls=parts))

    transcript = Transcript()
    assert transcript.add(event(pb.ToolCallDelta(index=0, id="a", name="f"))) == Delta(
        tool_calls=(ToolCallDelta(0, "", "a", "f"),)
    )
    assert transcript.has_content
    with pytest.raises(InternalError, match="gap"):
        transcript.add(event(pb.ToolCallDelta(index=1, arguments="{}")))
