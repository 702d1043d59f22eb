"""The official client of Anthropic gets its answers from the gateway."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from lookonce.errors import LookonceError, OverloadedError, UnauthenticatedError, UnavailableError
from lookonce.testing import FakeServer
from tests.gateway_svc.gateways import KEY, PICTURE, Gateway, running_gateway

ANSWER = "a red square"
SOURCE: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()}
BLOCKS: Any = [{"type": "image", "source": SOURCE}, {"type": "text", "text": "What is it?"}]


@pytest.fixture
def server() -> Any:
    with FakeServer(ANSWER) as running:
        yield running


@pytest.fixture
async def gateway(server: FakeServer) -> AsyncIterator[Gateway]:
    async with running_gateway(server.target) as running:
        yield running


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as one:
        yield one


async def test_a_message_with_a_picture(server: FakeServer, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(
        model="fake",
        max_tokens=20,
        system=[{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": BLOCKS}],
        stop_sequences=["x"],
        extra_body={"temperature": 0.5, "top_k": 3},
    )
    (block,) = message.content
    assert (block.type, getattr(block, "text", "")) == ("text", ANSWER)
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "fake")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (21, 3)
    (request,) = server.requests
    assert request.text == "be short\nWhat is it?"
    assert [image.data for image in request.images] == [PICTURE]
    assert request.options == {"max_tokens": 20, "stop": ["x"], "temperature": 0.5, "top_k": 3}
    assert request.metadata["authorization"] == f"Bearer {KEY}"


async def test_a_streamed_message(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(
        model="fake", max_tokens=20, messages=[{"role": "user", "content": "hello"}]
    ) as stream:
        assert "".join([text async for text in stream.text_stream]) == ANSWER
        final = await stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 3)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnauthenticatedError("no"), anthropic.AuthenticationError),
        (OverloadedError("full"), anthropic.RateLimitError),
        (UnavailableError("gone", retry_after_s=90.0), anthropic.APIStatusError),
    ],
)
async def test_errors_are_those_of_anthropic(
    server: FakeServer, client: anthropic.AsyncAnthropic, error: LookonceError, kind: type[anthropic.APIStatusError]
) -> None:
    server.fail(error, error, error)
    with pytest.raises(kind) as caught:
        await client.messages.create(model="fake", max_tokens=20, messages=[{"role": "user", "content": "hello"}])
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert error.message in body["error"]["message"]


async def test_a_field_that_is_not_honoured_is_refused(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"thinking.type: must be .*INVALID_PARAMETER"):
        await client.messages.create(
            model="fake",
            max_tokens=20,
            messages=[{"role": "user", "content": "hello"}],
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="other", max_tokens=20, messages=[{"role": "user", "content": "hello"}])
