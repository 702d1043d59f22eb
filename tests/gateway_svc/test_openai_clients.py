"""The official clients of OpenAI, and LangChain's, get their answers from the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from lookonce.errors import (
    DeadlineError,
    ImageUndecodableError,
    LookonceError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from lookonce.generation import Delta
from lookonce.testing import FakeRequest, FakeServer
from tests.gateway_svc.gateways import KEY, PICTURE, Gateway, picture_part, running_gateway

MODEL = "fake"
ANSWER = "a red square"
JSON_OBJECT: Any = {"type": "json_object"}
QUESTION: list[Any] = [{"type": "text", "text": "What is it?"}, picture_part()]


@pytest.fixture
def server() -> Any:
    with FakeServer(ANSWER) as running:
        yield running


@pytest.fixture
async def gateway(server: FakeServer) -> AsyncIterator[Gateway]:
    async with running_gateway(server.target) as running:
        yield running


def asked(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": role, "content": content} for role, content in messages]}


async def test_a_chat_with_a_picture(server: FakeServer, gateway: Gateway) -> None:
    chat = asked(("developer", "be short"), ("user", QUESTION), ("assistant", "a square"), ("user", "which colour?"))
    completion = await gateway.client.chat.completions.create(**chat, temperature=0.5, stop="x", seed=-1, max_tokens=9)
    (choice,) = completion.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (ANSWER, "assistant", "stop")
    assert completion.model == MODEL
    usage = completion.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.model_extra is not None
    assert usage.model_extra["lookonce"]["encoded_image_tokens"] == 16
    (request,) = server.requests
    assert request.text == "be short\nWhat is it?\na square\nwhich colour?"
    assert [image.data for image in request.images] == [PICTURE]
    assert request.options == {"temperature": 0.5, "stop": ["x"], "seed": (1 << 64) - 1, "max_tokens": 9}
    assert request.metadata["authorization"] == f"Bearer {KEY}"
    assert completion.id == f"chatcmpl-{request.request_id}"


async def test_a_stream(server: FakeServer, gateway: Gateway) -> None:
    stream = await gateway.client.chat.completions.create(
        **asked(("user", QUESTION)), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[-1].choices, chunks[-2].usage) == ([], None)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_every_event_has_the_usage_so_far_where_it_is_asked_for(
    server: FakeServer, gateway: Gateway, kind: str
) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if kind == "chat":
        stream: Any = await gateway.client.chat.completions.create(**asked(("user", QUESTION)), **options, n=2)
    else:
        stream = await gateway.client.completions.create(model=MODEL, prompt="hello", n=2, **options)
    usages = [chunk.usage async for chunk in stream]
    assert all(usage is not None for usage in usages)
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert (counts[-1], usages[-1].prompt_tokens) == (6, max(usage.prompt_tokens for usage in usages))
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
    del options["stream_options"]["include_usage"]
    with pytest.raises(openai.BadRequestError, match="needs include_usage"):
        await gateway.client.chat.completions.create(**asked(("user", QUESTION)), **options)


def synchronous(port: int) -> tuple[str | None, str, str, list[str]]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
        whole = client.chat.completions.create(**asked(("user", "hello")))
        with client.chat.completions.stream(**asked(("user", "hello"))) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
        response = client.responses.create(model=MODEL, input="hello")
        return whole.choices[0].message.content, text, response.output_text, [one.id for one in client.models.list()]


async def test_the_synchronous_client(gateway: Gateway) -> None:
    assert await asyncio.to_thread(synchronous, gateway.port) == (ANSWER, ANSWER, ANSWER, [MODEL])


@pytest.mark.parametrize("streams", [False, True])
async def test_several_answers_have_an_index_and_count_the_prompt_once(
    server: FakeServer, gateway: Gateway, streams: bool
) -> None:
    chat = asked(("user", QUESTION))
    texts = {0: "", 1: "", 2: ""}
    if streams:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream: Any = await gateway.client.chat.completions.create(**chat, n=3, seed=5, **options)
        async for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        completion = await gateway.client.chat.completions.create(**chat, n=3, seed=5)
        texts = {choice.index: choice.message.content or "" for choice in completion.choices}
        usage = completion.usage
    assert texts == dict.fromkeys(range(3), ANSWER)
    assert (usage.prompt_tokens, usage.completion_tokens) == (19, 9)
    assert sorted(str(request.options["seed"]) for request in server.requests) == ["5", "6", "7"]
    assert len({request.request_id for request in server.requests}) == 3


async def test_completions(server: FakeServer, gateway: Gateway) -> None:
    completion = await gateway.client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=4)
    assert [choice.text for choice in completion.choices] == [ANSWER] * 4
    assert sorted(request.text for request in server.requests) == ["one", "one", "two", "two"]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 12)
    stream = await gateway.client.completions.create(model=MODEL, prompt="one", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert server.requests[-1].options == {"max_tokens": 16}


async def test_a_response(server: FakeServer, gateway: Gateway) -> None:
    image = {"type": "input_image", "image_url": picture_part()["image_url"]["url"], "detail": "low"}
    content: Any = [image, {"type": "input_text", "text": "What is it?"}]
    response = await gateway.client.responses.create(
        model=MODEL, instructions="be short", input=[{"role": "user", "content": content}], max_output_tokens=8
    )
    assert (response.output_text, response.status, response.instructions) == (ANSWER, "completed", "be short")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + 3
    (request,) = server.requests
    assert request.text == "be short\nWhat is it?"
    assert request.images[0].max_pixels == 512 * 512
    # An answer can be sent back as it came.
    back: Any = [{"role": "user", "content": "hello"}, *(one.model_dump() for one in response.output)]
    await gateway.client.responses.create(model=MODEL, input=[*back, {"role": "user", "content": "and now?"}])
    assert server.requests[-1].text == f"hello\n{ANSWER}\nand now?"


async def test_a_streamed_response(gateway: Gateway) -> None:
    async with gateway.client.responses.stream(model=MODEL, input="hello") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].type == "response.completed"


async def test_models(gateway: Gateway) -> None:
    listed = [model async for model in gateway.client.models.list()]
    assert [model.id for model in listed] == [MODEL]
    assert (await gateway.client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await gateway.client.models.retrieve("other/model")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ImageUndecodableError("no image"), openai.BadRequestError),
        (UnauthenticatedError("no"), openai.AuthenticationError),
        (PermissionDeniedError("no"), openai.PermissionDeniedError),
        (OverloadedError("full", retry_after_s=90.0), openai.RateLimitError),
        (UnavailableError("gone", retry_after_s=90.0), openai.InternalServerError),
        (DeadlineError("late"), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_errors_are_those_of_openai(
    server: FakeServer, gateway: Gateway, error: LookonceError, kind: type[openai.APIStatusError], streams: bool
) -> None:
    server.fail(error)
    with pytest.raises(kind) as caught:
        await gateway.client.chat.completions.create(**asked(("user", "hello")), stream=streams)
    assert caught.value.code == error.reason
    assert error.message in caught.value.message
    if error.retry_after_s:
        assert caught.value.response.headers["retry-after"] == "90"
    assert caught.value.request_id == server.requests[0].request_id


async def test_an_error_after_the_first_piece_ends_the_stream(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lookonce.aio import AsyncTextStream

    async def broken(self: AsyncTextStream) -> Delta:
        if self._transcript.has_content:
            raise UnavailableError("the decoder is gone")
        return await original(self)

    original = AsyncTextStream._next
    monkeypatch.setattr(AsyncTextStream, "_next", broken)
    stream = await gateway.client.chat.completions.create(**asked(("user", "hello")), stream=True)
    assert [(await anext(stream)).choices[0].delta.content for _ in range(2)] == ["", "a"]
    with pytest.raises(openai.APIError, match="the decoder is gone"):
        await anext(stream)
    response = await gateway.client.responses.create(model=MODEL, input="hello", stream=True)
    events = [event async for event in response]
    assert (events[-1].type, getattr(events[-1], "message", "")) == ("error", "the decoder is gone")


async def test_structured_output_is_refused_by_name_where_the_decoder_has_none(gateway: Gateway) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for response_format in (schema, JSON_OBJECT):
        with pytest.raises(openai.BadRequestError) as caught:
            await gateway.client.chat.completions.create(**asked(("user", "hello")), response_format=response_format)
        assert caught.value.code == "UNSUPPORTED"
    await gateway.client.chat.completions.create(**asked(("user", "hello")), response_format={"type": "text"})


async def test_langchain(server: FakeServer, gateway: Gateway) -> None:
    def conversation() -> tuple[AIMessage, str]:
        chat = ChatOpenAI(model=MODEL, base_url=f"{gateway.url}/v1", api_key=KEY, temperature=0.0, max_retries=0)  # type: ignore[arg-type]
        messages = [SystemMessage("be short"), HumanMessage(QUESTION)]
        answer = chat.invoke(messages)
        assert isinstance(answer, AIMessage)
        return answer, "".join(str(chunk.content) for chunk in chat.stream([*messages, answer, HumanMessage("more")]))

    answer, streamed = await asyncio.to_thread(conversation)
    assert (answer.content, streamed) == (ANSWER, ANSWER)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 3
    assert server.requests[-1].text == f"be short\nWhat is it?\n{ANSWER}\nmore"


async def test_a_picture_is_sent_to_the_decoder_once(server: FakeServer, gateway: Gateway) -> None:
    large = bytes(range(256)) * 1000
    for _ in range(2):
        await gateway.client.chat.completions.create(**asked(("user", [picture_part(large)])))
    assert [len(upload.data or b"") for upload in server.images.uploads] == [len(large)]


async def test_functions_may_answer_by_the_request(gateway: Gateway, server: FakeServer) -> None:
    def answer(request: FakeRequest) -> str:
        return request.metadata["authorization"]

    with FakeServer(answer) as other:
        async with running_gateway(other.target) as second:
            client = second.client.with_options(api_key="another")
            completion = await client.chat.completions.create(**asked(("user", "who am I?")))
            assert completion.choices[0].message.content == "Bearer another"
