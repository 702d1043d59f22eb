"""Functions and reasoning of a real decoder: what a small model is forced to call arrives in every interface."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

from tests.conftest import DEMO_MODEL
from tests.gateway_svc.gateways import KEY, Gateway, running_decoder, running_gateway
from tests.tool_models import TEMPLATES, tool_folder, with_reasoning

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "light blue"]}, "exact": {"type": "boolean"}},
    "required": ["colour", "exact"],
    "additionalProperties": False,
}
FIND = {"name": "find", "description": "Finds it.", "parameters": SCHEMA}
STOP = {"name": "stop", "description": "Stops."}
CHAT_TOOLS: Any = [{"type": "function", "function": FIND}, {"type": "function", "function": STOP}]
QUESTION: Any = [{"role": "user", "content": "Find it."}]
NAMED: Any = {"type": "function", "function": {"name": "find"}}
THINKING: Any = {"chat_template_kwargs": {"enable_thinking": True}}


@asynccontextmanager
async def gateway_of(folder: pathlib.Path) -> AsyncIterator[Gateway]:
    async with running_decoder(folder) as target, running_gateway(target) as running:
        yield running


@pytest.fixture
async def gateway(tmp_path: pathlib.Path) -> AsyncIterator[Gateway]:
    """A gateway before a model that knows functions."""
    async with gateway_of(tool_folder(tmp_path / "model", TEMPLATES["hermes"])) as running:
        yield running


@pytest.fixture
async def reasoning(tmp_path: pathlib.Path) -> AsyncIterator[Gateway]:
    """A gateway before a model that reasons if it is told to."""
    async with gateway_of(tool_folder(tmp_path / "model", with_reasoning(TEMPLATES["hermes"]))) as running:
        yield running


async def model_of(gateway: Gateway) -> str:
    return (await gateway.client.models.list()).data[0].id


async def whole_and_streamed(gateway: Gateway, **options: Any) -> list[Any]:
    """Returns the same completion twice: whole, and put together from a stream."""
    create = {"model": await model_of(gateway), "messages": QUESTION, "max_tokens": 300, "seed": 3, **options}
    whole = await gateway.client.chat.completions.create(**create)
    create["stream_options"] = {"include_usage": True}
    async with gateway.client.chat.completions.stream(**create) as stream:
        # The client has no final completion of an answer that was cut off.
        *_, streamed = [event.snapshot async for event in stream if event.type == "chunk"]
    return [whole, streamed]


def parts_of(completion: Any) -> tuple[Any, ...]:
    """Returns what two equal answers have in common: ids of calls are random."""
    message = completion.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    reasoning = message.model_extra.get("reasoning_content")
    return completion.choices[0].finish_reason, message.content or None, reasoning, calls


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_calls_of_a_chat(gateway: Gateway, choice: Any) -> None:
    whole, streamed = await whole_and_streamed(
        gateway, tools=CHAT_TOOLS, tool_choice=choice, temperature=1.0, logprobs=True, top_logprobs=1
    )
    reason, content, reasoning, calls = parts_of(whole)
    assert (reason, content, reasoning) == ("tool_calls", None, None)
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMA if name == "find" else {"maxProperties": 0})
    if choice is NAMED:
        assert [name for name, _ in calls] == ["find"]
    assert parts_of(streamed) == parts_of(whole)
    # Each token has an entry, those of marks and names among them.
    for completion in (whole, streamed):
        assert len(completion.choices[0].logprobs.content) == completion.usage.completion_tokens > 5


async def test_one_call_at_most(gateway: Gateway) -> None:
    options: Any = {"tools": CHAT_TOOLS, "tool_choice": "required", "temperature": 1.0}
    # Without a bias, this model seldom calls more than one.
    many, _ = await whole_and_streamed(gateway, **options, logit_bias={"2": -100})
    assert len(parts_of(many)[-1]) > 1
    one, streamed = await whole_and_streamed(gateway, **options, parallel_tool_calls=False)
    assert parts_of(one)[-1] == parts_of(many)[-1][:1] == parts_of(streamed)[-1]


async def test_reasoning_of_a_chat(reasoning: Gateway) -> None:
    options: Any = {"temperature": 0.0, "max_tokens": 12, "logprobs": True}
    min_tokens = {"min_tokens": 12}
    whole, streamed = await whole_and_streamed(reasoning, **options, extra_body=THINKING | min_tokens)
    assert parts_of(streamed) == parts_of(whole)
    assert parts_of(whole)[1] is None
    assert parts_of(whole)[2]
    for completion in (whole, streamed):
        assert len(completion.choices[0].logprobs.content) == completion.usage.completion_tokens == 12
    plain, _ = await whole_and_streamed(reasoning, **options, reasoning_effort="none", extra_body=min_tokens)
    assert parts_of(plain)[1]
    assert parts_of(plain)[2] is None


async def test_a_result_comes_back(gateway: Gateway) -> None:
    whole, _ = await whole_and_streamed(gateway, tools=CHAT_TOOLS, tool_choice=NAMED)
    message = whole.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "three"}
    last = await gateway.client.chat.completions.create(
        model=await model_of(gateway),
        messages=[*QUESTION, message, result],
        tools=CHAT_TOOLS,
        max_tokens=5,
        temperature=0.0,
    )
    assert last.usage is not None
    assert last.usage.prompt_tokens > whole.usage.prompt_tokens
    assert parts_of(last)[1]


async def test_forced_calls_of_a_response(gateway: Gateway) -> None:
    options: Any = {
        "model": await model_of(gateway),
        "input": QUESTION,
        "tools": [{"type": "function", **FIND, "strict": False}],
        "tool_choice": {"type": "function", "name": "find"},
        "temperature": 0.0,
    }
    whole: Any = await gateway.client.responses.create(**options)
    async with gateway.client.responses.stream(**options) as stream:
        streamed: Any = await stream.get_final_response()
    for response in (whole, streamed):
        (call,) = response.output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert (call.name, call.status, response.status) == ("find", "completed", "completed")
    assert whole.output[0].arguments == streamed.output[0].arguments


@pytest.mark.parametrize("extra", [{}, THINKING])
async def test_log_probabilities_of_a_response_are_those_of_its_text(reasoning: Gateway, extra: Any) -> None:
    options: Any = {
        "model": await model_of(reasoning),
        "input": QUESTION,
        "top_logprobs": 1,
        "max_output_tokens": 12,
        "temperature": 0.0,
        "extra_body": {"min_tokens": 12, **extra},
    }
    whole = await reasoning.client.responses.create(**options)
    stream = await reasoning.client.responses.create(**options, stream=True)
    events: list[Any] = [event async for event in stream]
    for response in (whole, events[-1].response):
        (item,) = response.output
        assert response.usage is not None
        if extra:
            assert item.type == "reasoning"
            assert item.status == "incomplete"
        else:
            assert item.type == "message"
            assert len(item.content[0].logprobs or ()) == response.usage.output_tokens
    told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert len(told) == (0 if extra else events[-1].response.usage.output_tokens)


async def test_forced_calls_of_a_message(gateway: Gateway) -> None:
    model = await model_of(gateway)
    tools: Any = [{"name": "find", "description": "Finds it.", "input_schema": SCHEMA}]
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        options: Any = {"model": model, "max_tokens": 300, "messages": QUESTION, "extra_body": {"temperature": 0.0}}
        options |= {"tools": tools, "tool_choice": {"type": "tool", "name": "find"}}
        whole: Any = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            streamed: Any = await stream.get_final_message()
        for message in (whole, streamed):
            (block,) = message.content
            assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
            jsonschema.validate(block.input, SCHEMA)
        assert whole.content[0].input == streamed.content[0].input


async def test_reasoning_of_a_message(reasoning: Gateway) -> None:
    """The template begins the reasoning in the prompt."""
    async with anthropic.AsyncAnthropic(base_url=reasoning.url, api_key=KEY, max_retries=0) as client:
        options: Any = {"model": await model_of(reasoning), "max_tokens": 5, "messages": QUESTION}
        counts = {}
        for kind in ("adaptive", "disabled"):
            options["thinking"] = {"type": kind}
            usage = (await client.messages.create(**options)).usage
            counts[kind] = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counts["adaptive"] > counts["disabled"]


class Found(BaseModel):
    """A thing that was found."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "light blue"]
    number: Literal[1, 2]


async def test_langchain_makes_objects_of_forced_calls(gateway: Gateway) -> None:
    model = ChatOpenAI(model=await model_of(gateway), base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)  # type: ignore[arg-type]
    structured = model.with_structured_output(Found, method="function_calling")
    found = await asyncio.to_thread(structured.invoke, "What is it?")
    assert isinstance(found, Found)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tools": [*CHAT_TOOLS, CHAT_TOOLS[0]]}, "tools[2].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        (
            {"messages": [*QUESTION, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
            "messages[1].tool_call_id",
        ),
        ({"tools": CHAT_TOOLS, "response_format": {"type": "json_object"}}, "tools"),
    ],
)
async def test_what_the_decoder_refuses_is_named(gateway: Gateway, values: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.client.chat.completions.create(
            **{"model": await model_of(gateway), "messages": QUESTION, **values}
        )
    assert caught.value.param == field
    assert str(caught.value.body).count(field)


async def test_a_model_without_functions_refuses_them() -> None:
    async with running_decoder(DEMO_MODEL) as target, running_gateway(target) as gateway:
        with pytest.raises(openai.BadRequestError, match="knows no functions") as caught:
            await gateway.client.chat.completions.create(
                model=await model_of(gateway), messages=QUESTION, tools=CHAT_TOOLS
            )
        assert (caught.value.param, caught.value.code) == ("tools", "UNSUPPORTED")
