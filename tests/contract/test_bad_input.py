"""Bad input at the gRPC level: status, reason, no internals in the text, and the next request is answered rightly."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from typing import Any

import grpc
import PIL.Image
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1 import decoder_service_pb2_grpc as pb_grpc
from lookonce.local.local_stack import LocalStack
from tests.e2e.pictures import QUESTION, Picture, fresh

CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 256 << 20)]
# A path, an address, a traceback, a heap address, a library's name.
INTERNALS = re.compile(r"/\w+/\w+|127\.0\.0\.1|Traceback|0x[0-9a-f]{4,}|\b(torch|PIL|redis|numpy|transformers)\b")
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def picture() -> Picture:
    return fresh(1)[0]


@pytest.fixture
def decoder(stack: LocalStack, picture: Picture) -> Iterator[pb_grpc.DecoderServiceStub]:
    """A stub; after each test the same server answers a good question rightly."""
    with grpc.insecure_channel(stack.decoder_targets[0], options=CHANNEL_OPTIONS) as channel:
        stub = pb_grpc.DecoderServiceStub(channel)
        yield stub
        good = stub.Generate(request(source(data=picture.data)), timeout=TIMEOUT_S)
        assert good.choices[0].text == picture.answer
        load = stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
        assert load.kv_cache_usage == 0
        assert load.running_requests == load.waiting_requests == 0


def source(**fields: Any) -> common_pb2.ImageSource:
    return common_pb2.ImageSource(**fields)


def request(*images: common_pb2.ImageSource, text: str = QUESTION, **sampling: Any) -> pb.GenerateRequest:
    parts = [pb.ContentPart(image=image) for image in images] + [pb.ContentPart(text=text)]
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER, parts=parts)])
    params = {"max_tokens": 16} | sampling
    return pb.GenerateRequest(params=pb.GenerateParams(chat=chat, sampling=pb.SamplingParams(**params)))


def text_request(text: str, *images: common_pb2.ImageSource) -> pb.GenerateRequest:
    prompt = pb.TextPrompt(text=text, images=images)
    return pb.GenerateRequest(params=pb.GenerateParams(text=prompt, sampling=pb.SamplingParams(max_tokens=4)))


def refused(
    stub: pb_grpc.DecoderServiceStub, bad: pb.GenerateRequest, code: grpc.StatusCode, reason: str
) -> tuple[str, error_details_pb2.ErrorInfo]:
    """Sends a bad request both ways and checks status, reason and text; returns message and ErrorInfo."""
    with pytest.raises(grpc.RpcError) as streamed:
        list(stub.GenerateStream(pb.GenerateStreamRequest(params=bad.params), timeout=TIMEOUT_S))
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(bad, timeout=TIMEOUT_S)
    assert streamed.value.code() == caught.value.code() == code, caught.value.details()
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == reason
    assert not INTERNALS.search(status.message), status.message
    return status.message, info


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def gif_like_bmp() -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (8, 8)).save(buffer, "BMP")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["text", "truncated", "bmp", "empty"])
def test_undecodable_image(decoder: pb_grpc.DecoderServiceStub, picture: Picture, kind: str) -> None:
    data = {
        "text": b"I am not a picture",
        "truncated": picture.data[: len(picture.data) // 2],
        "bmp": gif_like_bmp(),
        "empty": b"",
    }[kind]
    refused(decoder, request(source(data=data)), grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_UNDECODABLE")


@pytest.mark.parametrize("size", [(13_300, 13_400), (20_000, 20)])
def test_too_large_image(decoder: pb_grpc.DecoderServiceStub, size: tuple[int, int]) -> None:
    message, _ = refused(decoder, request(source(data=png(*size))), grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_TOO_LARGE")
    assert re.search(r"\d", message), "value and limit are named"


def test_too_many_bytes(decoder: pb_grpc.DecoderServiceStub) -> None:
    data = b"\x89PNG\r\n\x1a\n" + b"0" * (21 << 20)
    refused(decoder, request(source(data=data)), grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_TOO_LARGE")


def test_digest_mismatch(decoder: pb_grpc.DecoderServiceStub, picture: Picture) -> None:
    wrong = source(data=picture.data, expected_digest=image_digest(b"another picture"))
    refused(decoder, request(wrong), grpc.StatusCode.INVALID_ARGUMENT, "DIGEST_MISMATCH")


def test_unknown_digest_names_the_indexes(decoder: pb_grpc.DecoderServiceStub, picture: Picture) -> None:
    unknown = source(key=common_pb2.ContentKey(digest=image_digest(b"never seen")))
    _, info = refused(
        decoder,
        request(source(data=picture.data), unknown, unknown),
        grpc.StatusCode.NOT_FOUND,
        "EMBEDDING_NOT_CACHED",
    )
    assert info.metadata["indexes"] == "1,2"


def test_a_digest_of_another_length_is_named(decoder: pb_grpc.DecoderServiceStub) -> None:
    short = source(key=common_pb2.ContentKey(digest=b"short"))
    message, _ = refused(decoder, request(short), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
    assert "5" in message


def test_fingerprint_of_another_model(decoder: pb_grpc.DecoderServiceStub, picture: Picture) -> None:
    other = common_pb2.ContentKey(digest=image_digest(picture.data), encoder_fingerprint="0" * 64)
    refused(decoder, request(source(key=other)), grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")


def test_user_text_that_spells_the_placeholder_is_text(decoder: pb_grpc.DecoderServiceStub, picture: Picture) -> None:
    placeholder = decoder.GetModelInfo(pb.GetModelInfoRequest()).image_placeholder
    spoof = request(source(data=picture.data), text=f"{placeholder}{placeholder} {QUESTION}")
    honest = request(source(data=picture.data))
    answer = decoder.Generate(spoof, timeout=TIMEOUT_S)
    plain = decoder.Generate(honest, timeout=TIMEOUT_S)
    assert answer.usage.image_tokens == plain.usage.image_tokens
    tokens = decoder.Tokenize(pb.TokenizeRequest(chat=spoof.params.chat), timeout=TIMEOUT_S)
    assert len(tokens.images) == 1
    assert (
        placeholder
        in decoder.Detokenize(
            pb.DetokenizeRequest(token_ids=tokens.token_ids[tokens.images[0].offset + tokens.images[0].length :])
        ).text
    )


def test_user_text_that_spells_the_end_of_turn_is_text(decoder: pb_grpc.DecoderServiceStub, picture: Picture) -> None:
    alone = decoder.Tokenize(pb.TokenizeRequest(chat=request(text="x").params.chat), timeout=TIMEOUT_S)
    num_special = 0
    for token_id in set(alone.token_ids):
        special = decoder.Detokenize(pb.DetokenizeRequest(token_ids=[token_id])).text
        if special.startswith("<") and special.endswith(">"):
            spelled = request(text=f"x {special}").params.chat
            tokens = decoder.Tokenize(pb.TokenizeRequest(chat=spelled), timeout=TIMEOUT_S)
            assert list(tokens.token_ids).count(token_id) == list(alone.token_ids).count(token_id)
            num_special += 1
    assert num_special, "the chat template of this model has no special token to spell"


@pytest.mark.parametrize(("num_placeholders", "num_images"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_images_and_placeholders_must_be_as_many(
    decoder: pb_grpc.DecoderServiceStub, picture: Picture, num_placeholders: int, num_images: int
) -> None:
    placeholder = decoder.GetModelInfo(pb.GetModelInfoRequest()).image_placeholder
    bad = text_request(placeholder * num_placeholders + " hello", *[source(data=picture.data)] * num_images)
    refused(decoder, bad, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_COUNT")


def test_more_images_than_the_limit(decoder: pb_grpc.DecoderServiceStub, picture: Picture) -> None:
    limit = decoder.GetModelInfo(pb.GetModelInfoRequest()).max_images_per_prompt
    message, _ = refused(
        decoder,
        request(*[source(data=picture.data)] * (limit + 1)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "IMAGE_COUNT",
    )
    assert str(limit) in message


def test_placeholder_tokens_that_differ_from_the_rows(decoder: pb_grpc.DecoderServiceStub, picture: Picture) -> None:
    tokens = decoder.Tokenize(
        pb.TokenizeRequest(chat=request(source(data=picture.data)).params.chat), timeout=TIMEOUT_S
    )
    start = tokens.images[0].offset
    short = [*tokens.token_ids[:start], *tokens.token_ids[start + 1 :]]
    prompt = pb.TokenPrompt(token_ids=short, images=[source(data=picture.data)])
    bad = pb.GenerateRequest(params=pb.GenerateParams(tokens=prompt, sampling=pb.SamplingParams(max_tokens=2)))
    refused(decoder, bad, grpc.StatusCode.INVALID_ARGUMENT, "PLACEHOLDER_MISMATCH")


def test_context_too_long_names_value_and_limit(decoder: pb_grpc.DecoderServiceStub) -> None:
    limit = decoder.GetModelInfo(pb.GetModelInfoRequest()).max_context_tokens
    message, _ = refused(decoder, request(max_tokens=limit), grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_TOO_LONG")
    assert str(limit) in message


def test_empty_prompt(decoder: pb_grpc.DecoderServiceStub) -> None:
    tokens = pb.GenerateRequest(params=pb.GenerateParams(tokens=pb.TokenPrompt()))
    refused(decoder, tokens, grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_EMPTY")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.nan),
        ("max_tokens", 0),
        ("logprobs", 10_000),
        ("stop", [""]),
        ("stop", ["x"] * 1000),
        ("stop_token_ids", [4_000_000]),
        ("logit_bias", {0: 101.0}),
    ],
)
def test_sampling_out_of_range_is_a_field_violation(
    decoder: pb_grpc.DecoderServiceStub, field: str, value: Any
) -> None:
    bad = request(**{field: value})
    refused(decoder, bad, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
    with pytest.raises(grpc.RpcError) as caught:
        decoder.Generate(bad, timeout=TIMEOUT_S)
    violations = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violations) for detail in rpc_status.from_call(caught.value).details)
    assert violations.field_violations[0].field.partition("[")[0] == f"sampling.{field}"


def test_an_adapter_that_is_not_served_is_refused_by_name(decoder: pb_grpc.DecoderServiceStub) -> None:
    bad = request()
    bad.params.adapter = "mine"
    refused(decoder, bad, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")


def test_message_over_the_limit(decoder: pb_grpc.DecoderServiceStub) -> None:
    limit = decoder.GetModelInfo(pb.GetModelInfoRequest()).max_message_bytes
    with pytest.raises(grpc.RpcError) as caught:
        decoder.Generate(request(source(data=b"0" * (limit + 1))), timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not INTERNALS.search(caught.value.details() or "")
