"""Calls of functions in the service, for each form of calls: forced ones conform, and the model gets the results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import jsonschema
import pytest
import pytest_asyncio

from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.decoders import RunningDecoder, running_decoder
from tests.tool_models import TEMPLATES, tool_folder, with_reasoning

# Tests share decoders, so they share an event loop, too.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMAS: dict[str, dict[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "colour": {"type": "string", "enum": ["red", "light blue"]},
            "number": {"type": "integer", "minimum": 0, "maximum": 8},
            "exact": {"type": "boolean"},
        },
        "required": ["colour", "exact"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
    "note": {
        "type": "object",
        "properties": {
            "place": {"type": ["integer", "null"]},
            "tags": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        },
        "additionalProperties": False,
    },
}
TOOLS = [pb.Tool(name=name, description=f"{name} it", parameters=json.dumps(SCHEMAS[name])) for name in SCHEMAS]
FORCED = sorted(TEMPLATES.keys() - {"gemma"})
# Names by which the marks of a form become tokens of their own.
TOKENS = {"<|picture|>": "<tool_call>", "<|system|>": "</tool_call>"}

Start = Callable[..., Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def start(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Start]:
    """Returns the decoder of a model that writes calls in a form. Tests of the same model share it."""
    async with AsyncExitStack() as stack:
        running: dict[tuple[str, bool, bool], RunningDecoder] = {}

        async def started(form: str, *, has_tokens: bool = False, reasons: bool = False) -> RunningDecoder:
            kind = form, has_tokens, reasons
            if kind not in running:
                template = with_reasoning(TEMPLATES[form]) if reasons else TEMPLATES[form]
                folder = tool_folder(tmp_path_factory.mktemp("tools") / form, template, TOKENS if has_tokens else None)
                running[kind] = await stack.enter_async_context(running_decoder(folder, dtype="float32"))
            return running[kind]

        yield started


def asked(mode: pb.ToolMode.ValueType = pb.TOOL_MODE_REQUIRED, **sampling: Any) -> pb.GenerateParams:
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role=pb.ROLE_USER, parts=[pb.ContentPart(text="Find it.")])],
        tools=TOOLS,
        tool_choice=pb.ToolChoice(mode=mode, name="find" if mode == pb.TOOL_MODE_NAMED else ""),
    )
    values = {"temperature": 1.5, "max_tokens": 400, **sampling}
    return pb.GenerateParams(chat=chat, sampling=pb.SamplingParams(**values))


async def answer(decoder: RunningDecoder, params: pb.GenerateParams) -> pb.Choice:
    """Returns the only answer, after comparing it with the same one in a stream."""
    whole = (await decoder.stub.Generate(pb.GenerateRequest(params=params))).choices[0]
    text, reasoning = "", ""
    calls: list[list[str]] = []
    async for event in decoder.stub.GenerateStream(pb.GenerateStreamRequest(params=params)):
        if event.HasField("delta"):
            text, reasoning = text + event.delta.text, reasoning + event.delta.reasoning
            for delta in event.delta.tool_calls:
                if delta.id:
                    assert delta.index == len(calls)
                    calls.append([delta.name, ""])
                calls[delta.index][1] += delta.arguments
        elif event.HasField("finished"):
            assert event.finished.finish_reason == whole.finish_reason
    assert (text, reasoning) == (whole.text, whole.reasoning)
    assert calls == [[call.name, call.arguments] for call in whole.tool_calls]
    return whole


def check(choice: pb.Choice) -> None:
    """Checks that an answer is nothing but calls that conform."""
    assert (choice.text, choice.finish_reason) == ("", pb.FINISH_REASON_TOOL_CALLS)
    assert choice.tool_calls
    assert len({call.id for call in choice.tool_calls}) == len(choice.tool_calls)
    for call in choice.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("form", FORCED)
async def test_forced_calls_conform(start: Start, form: str) -> None:
    decoder = await start(form)
    for name in SCHEMAS:
        for seed in range(2):
            params = asked(pb.TOOL_MODE_NAMED, seed=seed)
            params.chat.tool_choice.name = name
            choice = await answer(decoder, params)
            check(choice)
            assert [call.name for call in choice.tool_calls] == [name]
    for seed in range(4):
        choice = await answer(decoder, asked(seed=seed))
        is_whole = choice.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert is_whole or choice.finish_reason == pb.FINISH_REASON_LENGTH
        # Nothing but the end of its list tells that a list of Python is one.
        assert choice.tool_calls or (not is_whole and form in ("python", "mistral_list"))
        # The model may go on calling until the answer is cut off; all calls before the last one are whole.
        for call in choice.tool_calls if is_whole else choice.tool_calls[:-1]:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("form", ["hermes", "glm", "qwen_xml"])
async def test_marks_that_are_tokens_stand_in_forced_calls(start: Start, form: str) -> None:
    decoder = await start(form, has_tokens=True)
    choice = await answer(decoder, asked(pb.TOOL_MODE_NAMED, seed=1))
    check(choice)
    assert {4, 5} <= set(choice.token_ids)


@pytest.mark.parametrize("form", sorted(TEMPLATES))
async def test_a_free_answer_is_text(start: Start, form: str) -> None:
    decoder = await start(form)
    choice = await answer(decoder, asked(pb.TOOL_MODE_AUTO, temperature=0.0, max_tokens=20))
    assert choice.text
    assert not choice.tool_calls
    assert choice.finish_reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)


async def test_a_strict_function_leaves_the_choice_and_binds_its_arguments(start: Start) -> None:
    """A free answer begins as it would without functions to force; a bias towards the mark makes it a call."""
    decoder = await start("hermes", has_tokens=True)
    params = asked(pb.TOOL_MODE_AUTO, temperature=0.0, max_tokens=300)
    params.chat.tools[0].strict = True
    free = await answer(decoder, params)
    assert free.text
    assert not free.tool_calls
    params.sampling.logit_bias[4] = 100.0
    called = await answer(decoder, params)
    assert called.token_ids[0] == 4
    for call in called.tool_calls[:-1]:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert called.tool_calls


async def test_only_one_call(start: Start) -> None:
    decoder = await start("hermes")
    params = asked(seed=2)
    params.chat.tool_choice.single_call = True
    choice = await answer(decoder, params)
    check(choice)
    assert len(choice.tool_calls) == 1


async def test_a_result_comes_back_to_the_model(start: Start) -> None:
    decoder = await start("mistral_list")
    params = asked(pb.TOOL_MODE_AUTO)
    call = pb.ToolCall(id="call_of_another_server", name="find", arguments='{"colour": "red"}')
    params.chat.messages.add(role=pb.ROLE_ASSISTANT, tool_calls=[call])
    params.chat.messages.add(
        role=pb.ROLE_TOOL, tool_call_id=call.id, parts=[pb.ContentPart(text="three <eos> of them")]
    )
    prompt = await decoder.stub.Tokenize(pb.TokenizeRequest(chat=params.chat))
    text = (await decoder.stub.Detokenize(pb.DetokenizeRequest(token_ids=prompt.token_ids))).text
    assert '[TOOL_CALLS] [{"name": "find", "arguments": {"colour": "red"}, "id": "' in text
    assert text.endswith("Result: three <eos> of them<|assistant|>")
    assert list(prompt.token_ids).count(2) == 1


async def test_a_call_that_is_no_json_can_be_sent_back(start: Start) -> None:
    """A model may have written it, and hears of its fault by the result."""
    decoder = await start("mistral")
    params = asked(pb.TOOL_MODE_AUTO)
    call = pb.ToolCall(id="abc", name="find", arguments='{"a": <eos>,,}')
    params.chat.messages.add(role=pb.ROLE_ASSISTANT, tool_calls=[call])
    params.chat.messages.add(role=pb.ROLE_TOOL, tool_call_id="abc", parts=[pb.ContentPart(text="no JSON")])
    prompt = await decoder.stub.Tokenize(pb.TokenizeRequest(chat=params.chat))
    text = (await decoder.stub.Detokenize(pb.DetokenizeRequest(token_ids=prompt.token_ids))).text
    assert '[ARGS]"{\\"a\\": <eos>,,}"' in text
    assert list(prompt.token_ids).count(2) == 1


async def test_the_model_does_not_see_functions_that_it_must_not_call(start: Start) -> None:
    decoder = await start("hermes")
    none, free = asked(pb.TOOL_MODE_NONE), asked(pb.TOOL_MODE_AUTO)
    plain = pb.ChatPrompt(messages=none.chat.messages)
    tokens = [
        list((await decoder.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids)
        for chat in (none.chat, plain, free.chat)
    ]
    assert tokens[0] == tokens[1] != tokens[2]


async def test_reasoning_that_the_prompt_begins_is_no_text(start: Start) -> None:
    decoder = await start("hermes", reasons=True)
    params = asked(pb.TOOL_MODE_AUTO, temperature=0.0, max_tokens=12, min_tokens=8)
    params.chat.template_arguments = '{"enable_thinking": true}'
    choice = await answer(decoder, params)
    assert choice.text == ""
    assert choice.reasoning
    forced = asked(temperature=1.0, seed=4, max_tokens=600)
    forced.chat.template_arguments = params.chat.template_arguments
    forced.sampling.stop.append("xyzzy")
    both = await answer(decoder, forced)
    if both.finish_reason == pb.FINISH_REASON_TOOL_CALLS:
        check(both)


def _tool(**fields: Any) -> Callable[[pb.GenerateParams], None]:
    return lambda params: params.chat.tools[0].MergeFrom(pb.Tool(**fields))


def _message(**fields: Any) -> Callable[[pb.GenerateParams], None]:
    return lambda params: params.chat.messages.insert(0, pb.ChatMessage(**fields))


REFUSED: dict[str, tuple[Callable[[pb.GenerateParams], object], str]] = {
    "name": (_tool(name="a b"), "chat.tools[0].name"),
    "twice": (_tool(name="stop"), "chat.tools[1].name"),
    "no JSON": (_tool(parameters="{"), "chat.tools[0].parameters"),
    "no object": (_tool(parameters="[]"), "chat.tools[0].parameters"),
    "a name twice": (_tool(parameters='{"properties": {"x": {}, "x": {}}}'), "chat.tools[0].parameters"),
    "not of an object": (_tool(parameters='{"type": "array"}'), "chat.tools[0].parameters"),
    "keyword": (_tool(parameters='{"type": "object", "if": {}}'), "chat.tools"),
    "unknown choice": (lambda p: p.chat.tool_choice.MergeFrom(pb.ToolChoice(name="x")), "chat.tool_choice.name"),
    "nothing to call": (lambda p: p.chat.ClearField("tools"), "chat.tool_choice"),
    "call of a user": (
        _message(role=pb.ROLE_USER, tool_calls=[pb.ToolCall(id="1", name="find", arguments="{}")]),
        "chat.messages[0]",
    ),
    "no id": (
        _message(role=pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(name="find", arguments="{}")]),
        "chat.messages[0].tool_calls[0].id",
    ),
    "result of nothing": (
        _message(role=pb.ROLE_TOOL, tool_call_id="x", parts=[pb.ContentPart(text="y")]),
        "chat.messages[0].tool_call_id",
    ),
    "template argument": (
        lambda p: setattr(p.chat, "template_arguments", '{"loud": true}'),
        "chat.template_arguments",
    ),
    "text for the template": (
        lambda p: setattr(p.chat, "template_arguments", '{"enable_thinking": "<eos>"}'),
        "chat.template_arguments",
    ),
    "two forms": (lambda p: setattr(p.sampling, "json_object", True), "chat.tools"),
    "no end": (lambda p: setattr(p.sampling, "ignore_eos", True), "sampling.ignore_eos"),
}


async def test_what_is_refused_is_named(start: Start) -> None:
    decoder = await start("hermes", reasons=True)
    for case, (change, field) in REFUSED.items():
        params = asked()
        change(params)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decoder.stub.Generate(pb.GenerateRequest(params=params))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (case, caught.value.details())
        assert str(caught.value.details()).startswith(field), (case, caught.value.details())


async def test_a_template_without_functions_is_named() -> None:
    async with running_decoder(DEMO_MODEL, dtype="float32") as decoder:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decoder.stub.Generate(pb.GenerateRequest(params=asked()))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "knows no functions" in str(caught.value.details())
        info = await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.tool_format, list(info.template_arguments)) == ("", [])
