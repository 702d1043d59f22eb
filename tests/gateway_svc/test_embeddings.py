"""Embeddings through OpenAI's client: the vectors of the SDK, for texts, tokens and chats with pictures."""

from __future__ import annotations

import base64
import hashlib
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any, cast

import openai
import pytest

from gateway_svc.apis.embeddings import EmbeddingRequest
from lookonce import AsyncClient, Message, TextPrompt, TokenPrompt
from lookonce.errors import InvalidParameterError
from tests.conftest import DEMO_MODEL
from tests.e2e.pictures import QUESTION, fresh
from tests.gateway_svc.gateways import KEY, Gateway, running_decoder, running_gateway
from tests.in_process_stack import InProcessStack

# Largest difference of one number of a vector between ways to the same answer.
TOLERANCE = 5e-3
TEXTS = ["A red star.", "<bos>Nothing at all, or so it seems.", "?"]


@pytest.fixture
async def target() -> AsyncIterator[str]:
    async with running_decoder(DEMO_MODEL) as target:
        yield target


@pytest.fixture
async def gateway(target: str) -> AsyncIterator[Gateway]:
    async with running_gateway(target) as running:
        yield running


async def served(gateway: Gateway) -> str:
    return (await gateway.client.models.list()).data[0].id


async def test_inputs_have_the_vectors_of_the_sdk_in_their_order(gateway: Gateway, target: str) -> None:
    model = await served(gateway)
    async with AsyncClient.connect(target) as client:
        for inputs in (TEXTS * 8, TEXTS[0], [100, 101, 102], [[100, 101], [103]]):
            given: Any = inputs
            many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
            prompts = [TextPrompt(one) if isinstance(one, str) else TokenPrompt(one) for one in many]
            expected = [(await client.embed(prompt)) for prompt in prompts]
            # The client asks for base64 unless it is told something else.
            for encoding in (openai.omit, "float"):
                answer = await gateway.client.embeddings.create(
                    model=model, input=given, encoding_format=cast(Any, encoding)
                )
                assert [one.index for one in answer.data] == list(range(len(many)))
                for found, one in zip(answer.data, expected, strict=True):
                    assert found.embedding == pytest.approx(one.embedding, abs=TOLERANCE)
                assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in expected)
                assert answer.usage.total_tokens == answer.usage.prompt_tokens
            mean = await gateway.client.embeddings.create(model=model, input=given, extra_body={"pooling": "mean"})
            wanted = await client.embed(prompts[0], pooling="mean")
            assert mean.data[0].embedding == pytest.approx(wanted.embedding, abs=TOLERANCE)


async def test_a_chat_with_a_picture_has_the_pictures_vector() -> None:
    found = []
    with InProcessStack(DEMO_MODEL, num_encoders=1, num_decoders=1) as stack:
        target = stack.decoder_targets[0]
        async with running_gateway(target) as gateway, AsyncClient.connect(target) as client:
            model = await served(gateway)
            for picture in fresh(2):
                url = f"data:image/png;base64,{base64.b64encode(picture.data).decode()}"
                parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
                body = {"model": model, "messages": [{"role": "user", "content": parts}]}
                status, answer = await gateway.post("/v1/embeddings", json.dumps(body).encode())
                assert status == 200, answer
                expected = await client.embed([Message("user", [picture.data, QUESTION])])
                (one,) = json.loads(answer)["data"]
                assert one["embedding"] == pytest.approx(expected.embedding, abs=TOLERANCE)
                assert json.loads(answer)["usage"]["lookonce"]["image_tokens"] > 0
                found.append(one["embedding"])
    # The distance depends on the pictures, which are others in each run.
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) > 3 * TOLERANCE


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": [[3], "a", []]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [[3], [1 << 40]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "priority": "low"}, "priority"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"messages": []}, "messages"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        EmbeddingRequest.parse({"model": "m", **values})
    assert caught.value.field == field


async def test_the_input_that_a_decoder_refuses_is_named(gateway: Gateway) -> None:
    model = await served(gateway)
    too_long = "a" * 20000
    for given, place in (
        ([100, 99999], "input"),
        ([[100, 99999]], "input[0]"),
        ([[100], [99999]], "input[1]"),
        (["a", "b", too_long], "input[2]"),
        (too_long, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await gateway.client.embeddings.create(model=model, input=cast(Any, given))
        assert caught.value.param == place
        assert str(caught.value.message).count(place)


async def test_other_fields_have_their_own_names(gateway: Gateway) -> None:
    model = await served(gateway)
    for more, field in (({"cache_salt": "a b"}, "cache_salt"), ({"priority": -1 << 40}, "priority")):
        for given in ("a", ["a", "b"]):
            body = json.dumps({"model": model, "input": given, **more}).encode()
            status, answer = await gateway.post("/v1/embeddings", body)
            assert (status, json.loads(answer)["error"]["param"]) == (400, field)
    body = json.dumps({"model": model, "input": "a", "half \ud800": 1}).encode()
    status, answer = await gateway.post("/v1/embeddings", body)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "half ?")


async def test_a_quota_slows_a_list_down_and_does_not_refuse_it(tmp_path: pathlib.Path) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (tmp_path / "tokens.toml").write_text(f'[[tokens]]\nname="a"\nsha256="{digest}"\ntenant="a"\nrole="client"\n')
    (tmp_path / "quotas.toml").write_text("[default]\nmax_in_flight = 2\nrequests_per_s = 10\n")
    files = {"auth_tokens_file": tmp_path / "tokens.toml", "quotas_file": tmp_path / "quotas.toml"}
    async with running_decoder(DEMO_MODEL, **files) as target, running_gateway(target) as gateway:
        model = await served(gateway)
        inputs = [f"a star, and {number} more" for number in range(40)]
        answer = await gateway.client.embeddings.create(model=model, input=inputs)
        assert len({tuple(one.embedding) for one in answer.data}) == len(inputs)
