"""The gateway in front of a running decoder: OpenAI's client gets the SDK's answers, and pictures are encoded once."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from lookonce.aio import AsyncClient
from lookonce.local.local_stack import LocalStack
from tests.conftest import DEMO_MODEL
from tests.e2e.pictures import QUESTION, Picture, fresh
from tests.gateway_svc.gateways import Gateway, data_url, running_gateway

MODEL = DEMO_MODEL.name


@pytest.fixture
async def gateway(stack: LocalStack) -> AsyncIterator[Gateway]:
    async with running_gateway(stack.decoder_targets[0]) as running:
        yield running


def question(picture: Picture) -> Any:
    image = {"type": "image_url", "image_url": {"url": data_url(picture.data)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]


async def test_pictures_are_answered_and_encoded_once(gateway: Gateway) -> None:
    for picture in fresh(3):
        first, again = [
            await gateway.client.chat.completions.create(
                model=MODEL, messages=question(picture), max_tokens=40, temperature=0
            )
            for _ in range(2)
        ]
        assert first.choices[0].message.content == again.choices[0].message.content == picture.answer
        counts = [completion.usage.model_extra["lookonce"] for completion in (first, again) if completion.usage]  # type: ignore[index]
        assert counts[0]["encoded_image_tokens"] == counts[0]["image_tokens"] > 0
        assert (counts[1]["encoded_image_tokens"], counts[1]["image_tokens"]) == (0, counts[0]["image_tokens"])
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


async def test_a_stream_and_a_response_have_the_same_answer(gateway: Gateway) -> None:
    (picture,) = fresh(1)
    stream = await gateway.client.chat.completions.create(
        model=MODEL, messages=question(picture), max_tokens=40, temperature=0, stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == picture.answer
    content: Any = [
        {"type": "input_image", "image_url": data_url(picture.data), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    response = await gateway.client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=40, temperature=0
    )
    assert (response.output_text, response.status) == (picture.answer, "completed")
    cut = await gateway.client.responses.create(model=MODEL, input="What is it?", max_output_tokens=1)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("streams", [False, True])
async def test_log_probabilities_have_the_text_of_their_tokens(
    stack: LocalStack, gateway: Gateway, streams: bool
) -> None:
    (picture,) = fresh(1)
    asked: Any = {"model": MODEL, "messages": question(picture), "max_tokens": 12, "temperature": 0}
    entries: list[Any] = []
    if streams:
        stream: Any = await gateway.client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if chunk.choices[0].logprobs:
                entries += chunk.choices[0].logprobs.content
    else:
        completion = await gateway.client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        text = completion.choices[0].message.content or ""
        assert completion.choices[0].logprobs is not None
        entries = completion.choices[0].logprobs.content or []
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        expected = await client.generate(QUESTION, [picture.data], max_tokens=12, temperature=0.0, logprobs=2)
        texts = await client.token_texts(expected.token_ids)
    assert text == expected.text
    assert [entry.token for entry in entries] == texts
    assert "".join(texts).strip().startswith(text.strip())
    for entry, top in zip(entries, expected.logprobs, strict=True):
        assert math.isclose(entry.logprob, top[0][1], rel_tol=1e-4, abs_tol=1e-4)
        assert len(entry.top_logprobs) == 2
        # Greedy: the sampled token is the likeliest one.
        assert entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes).decode() == entry.token


async def test_older_log_probabilities_have_offsets(gateway: Gateway) -> None:
    completion = await gateway.client.completions.create(model=MODEL, prompt="a red", max_tokens=6, logprobs=1)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:index])) for index in range(len(logprobs.tokens))]
    assert [len(top) for top in logprobs.top_logprobs or []] == [1] * len(logprobs.tokens)


async def test_equal_seeds_give_equal_answers(gateway: Gateway) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 12}
    first, second = [
        await gateway.client.chat.completions.create(**asked, temperature=2.0, seed=7, n=3) for _ in range(2)
    ]
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
    ],
)
async def test_values_out_of_range_name_their_field(gateway: Gateway, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], **options
        )
    assert param in (caught.value.param or "")


async def test_a_file_that_is_no_image_is_refused(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.client.chat.completions.create(model=MODEL, messages=question(Picture(b"no image", "")))
    assert caught.value.code == "IMAGE_UNDECODABLE"


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue", "yellow", "orange", "purple", "pink", "black"]
    places: Annotated[list[Literal[1, 2, 3]], pydantic.Field(max_length=3)]


async def test_answers_have_the_form_that_was_asked_for(gateway: Gateway) -> None:
    (picture,) = fresh(1)
    asked: Any = {"model": MODEL, "messages": question(picture), "max_tokens": 200, "temperature": 1, "seed": 3}
    parsed = await gateway.client.chat.completions.parse(**asked, response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    anything = await gateway.client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)
    chosen = await gateway.client.chat.completions.create(**asked, extra_body={"choice": ["a cat", "a dog"]})
    assert chosen.choices[0].message.content in ("a cat", "a dog")
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match=r"response_format.*Unimplemented keys: ..not") as caught:
        await gateway.client.chat.completions.create(**asked, response_format=wrong)
    assert caught.value.param == "response_format"
