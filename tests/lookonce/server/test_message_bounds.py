"""Messages that would stop the process while they are parsed are refused unparsed; honest ones pass, of any size."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce import errors, status_codes
from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb
from lookonce.server.message_bounds import MAX_FIELDS, MAX_IMAGELESS_BYTES, MessageBounds, _Walk
from tests.lookonce.server.running_server import rpc_failure, running_server

GENERATE = MessageBounds.of(pb.GenerateRequest.FromString)
# More than a message may have, and too large to be parsed unseen.
MANY = 100_000
IMAGE = common_pb2.ImageSource(data=b"x" * (8 << 20))


def number(value: int) -> bytes:
    """The encoding of a number (https://protobuf.dev/programming-guides/encoding)."""
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(index: int, content: bytes) -> bytes:
    """The encoding of a field with a length."""
    return number(index << 3 | 2) + number(len(content)) + content


def params(index: int, content: bytes) -> bytes:
    """A GenerateRequest with one field of its parameters."""
    return field(1, field(index, content))


CHAT, TEXT, TOKENS, SAMPLING = 3, 4, 5, 6
HOSTILE = {
    "messages": params(CHAT, field(1, b"") * MANY),
    "parts": params(CHAT, field(1, field(2, b"") * MANY)),
    "images": params(TEXT, field(2, b"") * MANY),
    "stop strings": params(SAMPLING, field(7, b"a") * MANY),
    "logit biases": params(SAMPLING, field(18, b"\x08\x01") * MANY),
    "numbers": params(TOKENS, field(1, b"\x01" * (2 << 20))),
    "single numbers": params(TOKENS, b"\x08\x01" * MANY),
    "text": params(TEXT, field(1, b"a" * (8 << 20))),
    "unknown numbers": b"\xf8\x07\x01" * MANY,
    "unknown fields": field(99, b"a") * MANY,
    "unknown bytes": field(99, b"a" * (2 << 20)),
    "groups": b"\x7b\x7c" * MANY,
    "fixed numbers": b"\x7d\0\0\0\0" * MANY,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_message_that_takes_long_to_parse_is_refused(name: str) -> None:
    with pytest.raises(errors.MessageTooLargeError, match="the request has more than"):
        await GENERATE.check(HOSTILE[name])


@pytest.mark.parametrize("name", ["messages", "single numbers", "groups"])
async def test_others_have_turns_while_a_message_is_checked(name: str) -> None:
    """The event loop stood still for 10 to 20 ms."""
    check = asyncio.create_task(GENERATE.check(HOSTILE[name]))
    num_turns = 0
    while not check.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert isinstance(check.exception(), errors.MessageTooLargeError)
    assert MAX_FIELDS / 1500 < num_turns < MAX_FIELDS / 500


HONEST: dict[str, Message] = {
    "an image": pb.GenerateRequest(
        params=pb.GenerateParams(text=pb.TextPrompt(text="what is it", images=[IMAGE])),
    ),
    "a conversation of a thousand messages": pb.GenerateRequest(
        params=pb.GenerateParams(
            chat=pb.ChatPrompt(
                messages=[
                    pb.ChatMessage(
                        role=pb.ROLE_USER,
                        parts=[
                            pb.ContentPart(image=common_pb2.ImageSource(data=b"x" * 100)),
                            pb.ContentPart(text="a" * 500),
                        ],
                    )
                ]
                * 1000
            )
        )
    ),
    "a prompt of 128k tokens": pb.GenerateRequest(
        params=pb.GenerateParams(tokens=pb.TokenPrompt(token_ids=[150_000] * (128 << 10), images=[IMAGE]))
    ),
    "an answer of 128k tokens": pb.DetokenizeRequest(token_ids=[150_000] * (128 << 10)),
    "sixteen images to encode": encoder_pb.EncodeRequest(items=[encoder_pb.EncodeItem(image=IMAGE)] * 4),
}


@pytest.mark.parametrize("name", HONEST)
async def test_an_honest_message_passes(name: str) -> None:
    message = HONEST[name]
    await MessageBounds.of(type(message).FromString).check(message.SerializeToString())


@pytest.mark.parametrize("stop", [1, 7, 70_000, -1])
async def test_a_malformed_message_is_left_to_the_parser(stop: int) -> None:
    whole = params(TEXT, field(1, b"a" * 100_000)) + field(99, b"b")
    await GENERATE.check(whole[:stop])
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(whole[:stop])


@settings(max_examples=300)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_walked_over(raw: bytes) -> None:
    deque(_Walk(raw).over(pb.GenerateRequest.DESCRIPTOR), maxlen=0)


@settings(max_examples=100)
@given(
    turns=st.lists(st.lists(st.text(max_size=20) | st.binary(max_size=20), max_size=5), max_size=8),
    stops=st.lists(st.text(min_size=1, max_size=3), max_size=4),
    token_ids=st.lists(st.integers(0, 2**31), max_size=50),
)
def test_fields_and_bytes_are_those_of_the_message(
    turns: list[list[str | bytes]], stops: list[str], token_ids: list[int]
) -> None:
    request = pb.GenerateRequest(params=pb.GenerateParams(sampling=pb.SamplingParams(stop=stops)))
    for parts in turns:
        message = request.params.chat.messages.add()
        for part in parts:
            if isinstance(part, str):
                message.parts.add().text = part
            else:
                message.parts.add().image.data = part
    request.params.sampling.stop_token_ids.extend(token_ids)
    walk = _Walk(request.SerializeToString())
    deque(walk.over(pb.GenerateRequest.DESCRIPTOR), maxlen=0)
    assert walk._num_fields == num_fields(request)
    texts = [*stops, *(part for parts in turns for part in parts if isinstance(part, str))]
    assert walk._num_text_bytes == sum(len(text.encode()) for text in texts)


def num_fields(message: Message) -> int:
    """Counts the fields on the wire; packed numbers are one."""
    found = 0
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            is_packed = descriptor.type != descriptor.TYPE_STRING
            found += 1 if is_packed or isinstance(value, str) else len(value)
        else:
            several = [value] if isinstance(value, Message) else list(value)
            found += sum(1 + num_fields(one) for one in several)
    return found


@pytest.mark.parametrize(
    ("kind", "has_images"),
    [
        (pb.GenerateRequest, True),
        (pb.TokenizeRequest, True),
        (encoder_pb.EncodeStreamRequest, True),
        (encoder_pb.LookupEmbeddingsRequest, False),
        (encoder_pb.EvictEmbeddingsRequest, False),
        (pb.DetokenizeRequest, False),
        (health_pb2.HealthCheckRequest, False),
    ],
)
def test_methods_whose_requests_can_hold_an_image_are_known(kind: type[Message], has_images: bool) -> None:
    assert MessageBounds.of(kind.FromString).has_images == has_images


async def test_a_request_that_cannot_hold_an_image_is_small() -> None:
    bounds = MessageBounds.of(health_pb2.HealthCheckRequest.FromString)
    name = field(1, b"a" * MAX_IMAGELESS_BYTES)
    with pytest.raises(errors.MessageTooLargeError, match=f"has {len(name)} bytes"):
        await bounds.check(name)
    await bounds.check(field(1, b"a" * 100_000))


async def test_the_caller_is_told_in_the_usual_form() -> None:
    async with running_server() as running:
        method: Any = running.channel.unary_unary("/lookonce.encoder.v1.EncoderService/GetEncoderInfo")
        failure = await rpc_failure(method(b"\xf8\x07\x01" * MANY, timeout=30))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = status_codes.from_rpc_error(failure)
        assert type(error) is errors.MessageTooLargeError
        assert str(MAX_FIELDS) in error.message
