"""The official clients call functions, send the results back, and get the model's reasoning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from lookonce.generation import Message, ToolCall
from lookonce.testing import FakeRequest, FakeServer
from tests.gateway_svc.gateways import KEY, PICTURE, Gateway, data_url, picture_part, running_gateway

MODEL = "fake"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
CALLS = (ToolCall("call_1", "find", '{"colour": "red"}'), ToolCall("call_2", "find", '{"colour": "light blue"}'))
FIRST = Message("assistant", "Let me look.", tool_calls=CALLS, reasoning="Two colours are asked for.")
LAST = "There are three."
QUESTION = "How many are red or light blue?"
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "find", "description": "Counts.", "parameters": SCHEMA}}]
RESPONSE_TOOLS: Any = [
    {"type": "function", "name": "find", "description": "Counts.", "parameters": SCHEMA, "strict": False}
]
MESSAGE_TOOLS: Any = [{"name": "find", "description": "Counts.", "input_schema": SCHEMA}]
# The conversation that the model sees before its last answer.
CONVERSATION = (
    Message("user", QUESTION),
    FIRST,
    Message("tool", "2", tool_call_id="call_1"),
    Message("tool", "1", tool_call_id="call_2"),
)


def answer_to(request: FakeRequest) -> str | Message:
    return LAST if request.messages[-1].role == "tool" else FIRST


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(answer_to) as running:
        yield running


@pytest.fixture
async def gateway(server: FakeServer) -> AsyncIterator[Gateway]:
    async with running_gateway(server.target) as running:
        yield running


@pytest.fixture
async def claude(gateway: Gateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        yield client


def check_conversation(server: FakeServer, *, has_reasoning: bool = True) -> None:
    """Checks the last request: the model got its calls and their results, and knows the function."""
    request = server.requests[-1]
    first = FIRST if has_reasoning else Message("assistant", FIRST.content, tool_calls=CALLS)
    assert request.messages == (CONVERSATION[0], first, *CONVERSATION[2:])
    assert [(one.name, one.description, json.loads(str(one.parameters))) for one in request.tools] == [
        ("find", "Counts.", SCHEMA)
    ]


async def chatted(gateway: Gateway, messages: list[Any], streams: bool) -> Any:
    """Returns the answer to a chat; in a stream, it is put together by OpenAI's client."""
    client = gateway.client.chat.completions
    if not streams:
        return (await client.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)).choices[0]
    async with client.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS) as stream:
        return (await stream.get_final_completion()).choices[0]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_chat(server: FakeServer, gateway: Gateway, streams: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    choice = await chatted(gateway, messages, streams)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", FIRST.content)
    assert choice.message.reasoning_content == FIRST.reasoning
    calls = choice.message.tool_calls
    assert [ToolCall(call.id, call.function.name, call.function.arguments) for call in calls] == list(CALLS)
    assert {call.type for call in calls} == {"function"}
    # The client's own objects go back as they came.
    messages.append(choice.message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": str(2 - i)} for i, call in enumerate(calls)]
    last = await chatted(gateway, messages, streams)
    assert (last.finish_reason, last.message.content) == ("stop", LAST)
    assert not last.message.tool_calls
    assert "reasoning_content" not in last.message.model_extra
    check_conversation(server)


async def test_chunks_of_a_chat(gateway: Gateway) -> None:
    stream = await gateway.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], tools=CHAT_TOOLS, stream=True
    )
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) async for chunk in stream]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[1] == {"reasoning_content": FIRST.reasoning}
    assert deltas[2:5] == [{"content": "Let"}, {"content": " me"}, {"content": " look."}]
    first, second, *others = [delta["tool_calls"] for delta in deltas[5:-1]]
    assert first == [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"colour'}}
    ]
    assert second == [{"index": 0, "function": {"arguments": '": "red"}'}}]
    assert [one["index"] for (one,) in others] == [1, 1]
    assert deltas[-1] == {}


async def test_an_answer_of_calls_has_no_content(gateway: Gateway) -> None:
    with FakeServer(Message("assistant", "", tool_calls=CALLS)) as server:
        async with running_gateway(server.target) as other:
            completion = await other.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": QUESTION}], tools=CHAT_TOOLS
            )
            message = completion.choices[0].message
            assert message.content is None
            assert message.model_extra == {}
            response = await other.client.responses.create(model=MODEL, input=QUESTION, tools=RESPONSE_TOOLS)
            assert [item.type for item in response.output] == ["function_call", "function_call"]


@pytest.mark.parametrize("streams", [False, True])
async def test_several_answers(gateway: Gateway, streams: bool) -> None:
    options: Any = {"messages": [{"role": "user", "content": QUESTION}], "tools": CHAT_TOOLS, "n": 3, "model": MODEL}
    if streams:
        async with gateway.client.chat.completions.stream(**options) as stream:
            choices: Any = (await stream.get_final_completion()).choices
    else:
        choices = (await gateway.client.chat.completions.create(**options)).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    for choice in choices:
        assert [call.function.arguments for call in choice.message.tool_calls] == [call.arguments for call in CALLS]


def synchronous(port: int) -> tuple[Any, Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": QUESTION}]
        whole = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS) as stream:
            parts = [one for one in stream if one.type == "tool_calls.function.arguments.done"]
        return whole.choices[0].message.tool_calls, parts


async def test_the_synchronous_client(gateway: Gateway) -> None:
    calls, parts = await asyncio.to_thread(synchronous, gateway.port)
    expected = [(call.name, call.arguments) for call in CALLS]
    assert [(call.function.name, call.function.arguments) for call in calls] == expected
    assert [(part.name, part.arguments) for part in parts] == expected


async def test_options_reach_the_decoder(server: FakeServer, gateway: Gateway) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    create = gateway.client.chat.completions.create
    named: Any = {"type": "function", "function": {"name": "find"}}
    choices: list[tuple[Any, str]] = [("auto", "auto"), ("none", "none"), ("required", "required"), (named, "find")]
    for choice, expected in choices:
        await create(model=MODEL, messages=messages, tools=CHAT_TOOLS, tool_choice=choice)
        assert server.requests[-1].tool_choice == expected
    await create(model=MODEL, messages=messages, reasoning_effort="none")
    assert json.loads(server.requests[-1].template_arguments) == {"enable_thinking": False}
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    await create(model=MODEL, messages=messages, extra_body=extra)
    assert json.loads(server.requests[-1].template_arguments) == {"enable_thinking": True}
    await create(model=MODEL, messages=messages)
    assert server.requests[-1].template_arguments == ""
    for wrong, field in (
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"loud": True}}}, "chat_template_kwargs"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, messages=messages, **wrong)
        assert caught.value.param == field


@pytest.mark.parametrize("streams", [False, True])
async def test_a_response(server: FakeServer, gateway: Gateway, streams: bool) -> None:
    async def asked(given: list[Any]) -> Any:
        if not streams:
            return await gateway.client.responses.create(model=MODEL, input=given, tools=RESPONSE_TOOLS)
        async with gateway.client.responses.stream(model=MODEL, input=given, tools=RESPONSE_TOOLS) as stream:
            return await stream.get_final_response()

    given: list[Any] = [{"role": "user", "content": QUESTION}]
    response = await asked(given)
    reasoning, message, *calls = response.output
    assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == ("reasoning", [], FIRST.reasoning)
    assert (message.type, response.output_text, response.status) == ("message", FIRST.content, "completed")
    assert [ToolCall(call.call_id, call.name, call.arguments) for call in calls] == list(CALLS)
    assert {item.status for item in response.output} == {"completed"}
    assert len({item.id for item in response.output}) == 4
    assert [(one.name, one.parameters, one.strict) for one in response.tools] == [("find", SCHEMA, False)]
    assert (response.tool_choice, response.parallel_tool_calls) == ("auto", True)
    given += response.output
    given += [
        {"type": "function_call_output", "call_id": call.call_id, "output": str(2 - i)} for i, call in enumerate(calls)
    ]
    last = await asked(given)
    assert (last.output_text, [item.type for item in last.output]) == (LAST, ["message"])
    check_conversation(server)


async def test_events_of_a_response(gateway: Gateway) -> None:
    stream = await gateway.client.responses.create(model=MODEL, input=QUESTION, tools=RESPONSE_TOOLS, stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    call = ["output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done"]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *[*call, "output_item.done"] * 2,
        "completed",
    ]
    indexes = [event.output_index for event in events[2:-1]]
    assert indexes == [0] * 6 + [1] * 8 + [2] * 5 + [3] * 5
    added = {event.output_index: event.item.id for event in events if event.type == "response.output_item.added"}
    for event in events[2:-1]:
        assert added[event.output_index] == (event.item_id if hasattr(event, "item_id") else event.item.id)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


@pytest.mark.parametrize("streams", [False, True])
async def test_a_message(server: FakeServer, claude: anthropic.AsyncAnthropic, streams: bool) -> None:
    async def asked(messages: list[Any]) -> anthropic.types.Message:
        options: Any = {"model": MODEL, "max_tokens": 50, "messages": messages, "tools": MESSAGE_TOOLS}
        if not streams:
            answer: anthropic.types.Message = await claude.messages.create(**options)
            return answer
        async with claude.messages.stream(**options) as stream:
            return await stream.get_final_message()

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = await asked(messages)
    thinking, text, *calls = message.content
    assert (thinking.type, getattr(thinking, "thinking", "")) == ("thinking", FIRST.reasoning)
    assert (text.type, getattr(text, "text", "")) == ("text", FIRST.content)
    assert [(call.type, call.id, call.name, call.input) for call in calls if call.type == "tool_use"] == [
        ("tool_use", call.id, call.name, json.loads(call.arguments)) for call in CALLS
    ]
    assert message.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": message.content})
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(2 - i)} for i, call in enumerate(CALLS)]
    messages.append({"role": "user", "content": results})
    last = await asked(messages)
    assert [(block.type, getattr(block, "text", "")) for block in last.content] == [("text", LAST)]
    assert last.stop_reason == "end_turn"
    check_conversation(server)


async def test_events_of_a_message(claude: anthropic.AsyncAnthropic) -> None:
    stream = await claude.messages.create(
        model=MODEL,
        max_tokens=50,
        messages=[{"role": "user", "content": QUESTION}],
        tools=MESSAGE_TOOLS,
        stream=True,
    )
    events: list[Any] = [event async for event in stream]
    blocks = [event for event in events if event.type.startswith("content_block")]
    assert [event.index for event in blocks] == [0] * 3 + [1] * 5 + [2] * 4 + [3] * 4
    kinds = [event.content_block.type for event in blocks if event.type == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    starts = [event.content_block for event in blocks if event.type == "content_block_start"]
    assert (starts[0].thinking, starts[0].signature, starts[1].text) == ("", "", "")
    assert [(start.id, start.name, start.input) for start in starts[2:]] == [(call.id, "find", {}) for call in CALLS]
    deltas = [event.delta.type for event in blocks if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta", *["text_delta"] * 3, *["input_json_delta"] * 4]
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2].delta.stop_reason == "tool_use"


async def test_images_as_results_stay_images(
    server: FakeServer, gateway: Gateway, claude: anthropic.AsyncAnthropic
) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": data_url().partition(",")[2]}
    use: Any = {"type": "tool_use", "id": "call_1", "name": "find", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "image", "source": source}]}
    await claude.messages.create(
        model=MODEL,
        max_tokens=50,
        messages=[{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
    )
    call: Any = {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": "{}"}
    output: Any = [{"type": "input_image", "image_url": data_url()}]
    shown: Any = {"type": "function_call_output", "call_id": "call_1", "output": output}
    await gateway.client.responses.create(model=MODEL, input=[call, shown])
    for request in server.requests:
        assert [message.role for message in request.messages] == ["assistant", "tool"]
        assert [image.data for image in request.images] == [PICTURE]
    messages: Any = [{"role": "tool", "tool_call_id": "call_1", "content": [picture_part()]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\].type: must be text"):
        await gateway.client.chat.completions.create(model=MODEL, messages=messages)


async def test_arguments_that_are_no_json_are_told_as_such() -> None:
    broken = Message("assistant", "", tool_calls=[ToolCall("call_1", "find", '{"colour": red}')])
    with FakeServer(broken) as server:
        async with running_gateway(server.target) as gateway:
            async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
                message = await client.messages.create(
                    model=MODEL,
                    max_tokens=50,
                    messages=[{"role": "user", "content": QUESTION}],
                    tools=MESSAGE_TOOLS,
                )
            (block,) = message.content
            assert block.type == "tool_use"
            assert block.input == {"INVALID_JSON": '{"colour": red}'}
            completion = await gateway.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": QUESTION}], tools=CHAT_TOOLS
            )
            (call,) = completion.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert call.function.arguments == '{"colour": red}'


@tool
def find(colour: str) -> str:
    """Counts the shapes of one colour in the picture."""
    return "2" if colour == "red" else "1"


class Colour(BaseModel):
    """The colour of one shape in the picture."""

    name: str


def langchain_model(gateway: Gateway, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("uses_responses", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_langchain_calls_functions(
    server: FakeServer, gateway: Gateway, streams: bool, uses_responses: bool
) -> None:
    def conversation() -> tuple[AIMessage, AIMessage]:
        bound = langchain_model(gateway, use_responses_api=uses_responses).bind_tools([find])

        def asked(messages: list[BaseMessage]) -> AIMessage:
            if not streams:
                return bound.invoke(messages)
            first, *others = bound.stream(messages)
            found: Any = first
            for chunk in others:
                found += chunk
            assert isinstance(found, AIMessage)
            return found

        messages: list[BaseMessage] = [HumanMessage(QUESTION)]
        first = asked(messages)
        results = [ToolMessage(find.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls]
        return first, asked([*messages, first, *results])

    first, last = await asyncio.to_thread(conversation)
    assert [(call["id"], call["name"], call["args"]) for call in first.tool_calls] == [
        (call.id, call.name, json.loads(call.arguments)) for call in CALLS
    ]
    assert last.text == LAST
    request = server.requests[-1]
    assert [message.tool_calls for message in request.messages] == [(), CALLS, (), ()]
    assert [message.content for message in request.messages[2:]] == ["2", "1"]
    # LangChain drops reasoning that is streamed, and that of chats.
    if uses_responses and not streams:
        assert request.messages[1].reasoning == FIRST.reasoning


async def test_langchain_makes_objects_of_calls() -> None:
    red = Message("assistant", "", tool_calls=[ToolCall("call_1", "Colour", '{"name": "red"}')])
    with FakeServer(red) as server:
        async with running_gateway(server.target) as gateway:
            model = langchain_model(gateway).with_structured_output(Colour, method="function_calling")
            assert await asyncio.to_thread(model.invoke, "Which colour?") == Colour(name="red")
    (request,) = server.requests
    assert (request.tool_choice, [one.name for one in request.tools]) == ("Colour", ["Colour"])
