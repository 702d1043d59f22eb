"""Errors of decoders name the fields of requests, and show nothing of other programs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway_svc.errors import body_of, presentable, renamed
from lookonce.errors import (
    DeadlineError,
    InternalError,
    InvalidParameterError,
    LookonceError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from lookonce.sdk.field_names import in_arguments
from lookonce.testing import FakeServer
from tests.gateway_svc.gateways import Gateway, picture_part, running_gateway


@pytest.mark.parametrize("kind", [UnavailableError, DeadlineError, OverloadedError, InternalError])
def test_texts_of_other_programs_are_replaced(kind: type[LookonceError]) -> None:
    error = kind("last error: ipv4:10.1.2.3:50051: Connection refused")
    assert presentable(error) is error
    error.text_is_foreign = True
    shown = presentable(error)
    assert "10.1.2.3" not in body_of(shown)["error"]["message"]
    assert (shown.code, shown.reason, shown.retry_after_s) == (error.code, error.reason, error.retry_after_s)


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (InvalidParameterError("sampling.temperature", "must be at least 0"), "temperature"),
        (InvalidParameterError("sampling.stop[0]", "is empty"), "stop[0]"),
        (InvalidParameterError("sampling.max_tokens", "must be at least 1"), "max_completion_tokens"),
        (InvalidParameterError("chat.messages", "must end with the user's"), "messages"),
        (InvalidParameterError("prompt", "is empty"), "messages"),
        (InvalidParameterError("images[1].max_pixels", "is not offered"), "messages[2].content[0]"),
        (InvalidParameterError("images[7].max_pixels", "is not offered"), "messages[7].max_pixels"),
        (InvalidParameterError("chat.messages[1].parts", "is empty"), "messages[2].content"),
        (InvalidParameterError("chat.messages[1].tool_calls[0].arguments", "is no JSON"), "messages[2].arguments"),
        (InvalidParameterError("chat.messages[10].role", "is wrong"), "messages[10].role"),
        (UnsupportedError("sampling.json_schema: is not offered"), "response_format"),
    ],
)
def test_fields_are_those_of_the_request(error: LookonceError, field: str) -> None:
    names = {"max_tokens": "max_completion_tokens", "json_schema": "response_format", "chat.messages": "messages"}
    names |= {"prompt": "messages", "images": "messages", "images[1]": "messages[2].content[0]"}
    names |= {"chat.messages[1]": "messages[2]", "chat.messages[1].tool_calls[0]": "messages[2]", ".parts": ".content"}
    message = renamed(error, names).message
    # The SDK has given its own name to the field.
    for one in (error, in_arguments(error)):
        changed = renamed(one, names)
        assert changed.message == message
        assert changed.message.startswith(f"{field}: ")
        assert changed.metadata["field"] == field
        assert (changed.code, changed.reason) == (error.code, error.reason)


def test_other_errors_keep_their_fields() -> None:
    for error in (InvalidParameterError("messages[0].role", "is wrong"), InternalError("a fault: of the server")):
        assert renamed(error, {}) is error


@pytest.fixture
def server() -> Any:
    with FakeServer("a red square") as running:
        yield running


@pytest.fixture
async def gateway(server: FakeServer) -> AsyncIterator[Gateway]:
    async with running_gateway(server.target) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "values", "field"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "top_logprobs"),
        ("responses", {"input": "x"}, "top_logprobs"),
        ("completions", {"prompt": "x"}, "logprobs"),
    ],
)
async def test_an_error_of_the_decoder_names_the_field(
    gateway: Gateway, server: FakeServer, path: str, values: Any, field: str
) -> None:
    server.fail(InvalidParameterError("sampling.logprobs", "is above the limit"))
    status, answer = await gateway.post(f"/v1/{path}", json.dumps({"model": "fake", **values}).encode())
    error = json.loads(answer)["error"]
    assert (status, error["param"], error["message"]) == (400, field, f"{field}: is above the limit")


async def test_a_picture_that_is_no_base64_is_named(gateway: Gateway) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}
    chat = {"model": "fake", "messages": [{"role": "user", "content": [picture_part(), broken]}]}
    status, answer = await gateway.post("/v1/chat/completions", json.dumps(chat).encode())
    assert (status, json.loads(answer)["error"]["param"]) == (400, "messages[0].content[1].image_url.url")
